import type { TranslationBundle } from '@jupyterlab/translation';
import type { Session } from '../api/tokens';
import { isMine } from './sessionactions';
import { deviceName, sessionName, stateSentence } from './words';

/** A job: all its ranks, or those that are on a device. */
export interface IJob {
  readonly id: string;
  /** Null: all ranks. */
  readonly device: string | null;
  readonly ranks: Session[];
}

/** True if a session is one of several ranks of a job. */
export function isRank(session: Session): boolean {
  return (session.ranks ?? 1) > 1;
}

/** Return the id of a rank's job: two notebooks may have given theirs the same. */
export function jobId({ owner, parent, job }: Session): string {
  return JSON.stringify([owner, parent, job]);
}

/** Return the jobs of sessions. */
export function jobsOf(sessions: readonly Session[]): IJob[] {
  return grouped(sessions, each => ({ id: jobId(each), device: null }));
}

/** Return the jobs of sessions, a separate one for each device that has ranks of it. */
export function partsOf(sessions: readonly Session[]): IJob[] {
  return grouped(
    sessions.filter(each => each.device),
    each => ({ id: JSON.stringify([each.device, jobId(each)]), device: each.device })
  );
}

function grouped(
  sessions: readonly Session[],
  place: (rank: Session) => Omit<IJob, 'ranks'>
): IJob[] {
  const found = new Map<string, IJob>();
  for (const each of sessions.filter(isRank)) {
    const at = place(each);
    const job = found.get(at.id) ?? { ...at, ranks: [] };
    job.ranks.push(each);
    found.set(at.id, job);
  }
  return [...found.values()];
}

/** Split the name of a session after its program: `train.py`, ` rank 1`. */
export function nameParts(name: string): [program: string, rank: string] {
  const found = / rank \d+$/.exec(name);
  return found ? [name.slice(0, found.index), found[0]] : [name, ''];
}

/** User-facing name of a job: that of its program. */
export function jobName([first]: readonly Session[], trans: TranslationBundle): string {
  return nameParts(sessionName(first, trans))[0];
}

/**
 * Describe how a job runs, and why, as its ranks that run do; else what it waits for. Empty for
 * other users' jobs.
 */
export function jobSentence(ranks: readonly Session[], trans: TranslationBundle): string {
  const mine = ranks.filter(isMine);
  const [rank] = [...mine.filter(each => each.state === 'running'), ...mine];
  return rank ? stateSentence(rank, trans) : '';
}

/** The number of ranks: `4 ranks`, `1 of 4 ranks`. */
export function ranksText(ranks: readonly Session[], trans: TranslationBundle): string {
  const all = ranks[0].ranks ?? ranks.length;
  return ranks.length === all
    ? trans._n('%1 rank', '%1 ranks', all, all)
    : trans.__('%1 of %2 ranks', ranks.length, all);
}

/** Where sessions are: `on GPU 1`, `on 2 GPUs`; empty if they are on none. */
export function placeText(sessions: readonly Session[], trans: TranslationBundle): string {
  const devices = new Set(sessions.flatMap(each => (each.device ? [each.device] : [])));
  const [first] = devices;
  return devices.size > 1
    ? trans._n('on %1 GPU', 'on %1 GPUs', devices.size, devices.size)
    : first
      ? trans.__('on %1', deviceName(first))
      : '';
}

/**
 * Describe what the process of a session has started, if that uses devices: `4 ranks on 2 GPUs`,
 * `eval.py on GPU 0`; a job that has another name than the session: `train.py, 4 ranks on 2 GPUs`.
 */
export function startedTexts(
  session: Session,
  sessions: readonly Session[],
  trans: TranslationBundle
): string[] {
  const started = sessions.filter(each => each.parent === session.id);
  const joined = (...parts: string[]) => parts.filter(Boolean).join(' ');
  const own = sessionName(session, trans);
  const jobs = jobsOf(started).map(({ ranks }) => {
    const [name, text] = [
      jobName(ranks, trans),
      joined(ranksText(ranks, trans), placeText(ranks, trans))
    ];
    return name === own ? text : trans.__('%1, %2', name, text);
  });
  const others = started
    .filter(each => !isRank(each))
    .map(each => joined(sessionName(each, trans), placeText([each], trans)));
  return [...jobs, ...others];
}
