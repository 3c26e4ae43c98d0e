import type { TranslationBundle } from '@jupyterlab/translation';
import { Signal } from '@lumino/signaling';
import { isWaiting } from '../text/facts';
import type { Shown } from '../ui/icons';
import type { Device, ISingModel, Outside, Session } from '../api/tokens';
import { isMine, obstacle } from '../text/sessionactions';
import { bytesText, occupancyText, usedPercent } from '../text/format';
import { deviceName, sessionName, shown, stateSentence, stateWord } from '../text/words';

/** Contents of a session's row. */
export interface ISessionRow {
  readonly id: string;
  readonly shown: Shown;
  readonly name: string;
  /** Owner; empty if the name contains it, or if all sessions are the same user's. */
  readonly owner: string;
  readonly word: string;
  readonly pinned: boolean;
  readonly memory: string;
  readonly device: string;
  /** Its number in a job, as text; empty if it is in none. */
  readonly rank: string;
  /** What happens next. */
  readonly sentence: string;
  /** Action of its button, or null. */
  readonly action: 'suspend' | 'resume' | null;
}

/** Contents of a device's row. */
export interface IDeviceRow {
  readonly name: string;
  /** Percentage of its memory in use. */
  readonly used: number;
  readonly occupancy: string;
  /** Number of sessions that wait for it. */
  readonly waiting: number;
  /** Why it is out of use; empty if it is in use. */
  readonly failure: string;
}

/** Contents of the row of a process that uses a device outside of sessions. */
export interface IOutsideRow {
  readonly name: string;
  readonly owner: string;
  readonly memory: string;
  readonly sentence: string;
}

/** Contents of the row of a job: of those of its ranks that are on a device. */
export interface IJobRow {
  readonly id: string;
  readonly name: string;
  /** Number of ranks. */
  readonly count: string;
  readonly memory: string;
}

/** A session with what is below it, or a job with its ranks. */
export interface IEntry {
  readonly id: string;
  readonly isJob: boolean;
  readonly mine: boolean;
  /** Sessions of processes that its process has started, and their jobs; or ranks. */
  readonly below: readonly IEntry[];
}

/** A device and who uses it, or the sessions on no device. */
export interface IGroup {
  readonly device: string | null;
  readonly sessions: readonly IEntry[];
  /** Ids of the rows of processes outside of sessions. */
  readonly outside: readonly string[];
}

/**
 * The rows of the panel.
 *
 * Note [Rows]: JupyterLab renders all items again for each `runningChanged`, and each of them then
 * connects once more to its section's signal, permanently. So that signal is emitted only when rows
 * are added, removed or moved. A change inside a row is reported only to that row, by `changed`,
 * and only if its text differs: row objects stay the same until then.
 */
export class Rows {
  /** Emitted when rows are added, removed or moved. */
  readonly moved = new Signal<this, void>(this);
  /** Emitted when the text of some rows has changed. */
  readonly changed = new Signal<this, void>(this);

  constructor(
    private readonly _model: ISingModel,
    private readonly _trans: TranslationBundle
  ) {
    this._read();
    _model.changed.connect(this._onChanged, this);
  }

  /** Devices and their sessions, in an order that states do not change. */
  get groups(): readonly IGroup[] {
    return this._groups;
  }

  /** An additional message, or one in place of the rows, in a sentence; empty if there is none. */
  get note(): string {
    return this._note;
  }

  session(id: string): ISessionRow | undefined {
    return this._sessions.get(id);
  }

  job(id: string): IJobRow | undefined {
    return this._jobs.get(id);
  }

  device(id: string): IDeviceRow | undefined {
    return this._devices.get(id);
  }

  outside(id: string): IOutsideRow | undefined {
    return this._outside.get(id);
  }

  /** Searchable texts of the row of a session, or of a process outside of sessions. */
  searched(id: string): string[] {
    const session = this._sessions.get(id);
    if (session) {
      return [session.name, session.owner, session.word, session.device];
    }
    const job = this._jobs.get(id);
    if (job) {
      return [job.name];
    }
    const process = this._outside.get(id);
    return process ? [process.name, process.owner] : [];
  }

  private _onChanged(): void {
    const before = this._shape;
    this._read();
    if (this._shape !== before) {
      this.moved.emit();
    }
    this.changed.emit();
  }

  private _read(): void {
    const { devices, sessions } = this._model;
    const several = new Set(sessions.map(each => each.owner)).size > 1;
    this._sessions = renewed(this._sessions, sessions, each =>
      this._sessionRow(each, several && each.name ? each.owner : '')
    );
    this._jobs = renewed(this._jobs, jobsOf(sessions), each => this._jobRow(each));
    const waiting = new Map<string | null, number>();
    sessions
      .filter(isWaiting)
      .forEach(each => waiting.set(each.device, (waiting.get(each.device) ?? 0) + 1));
    this._devices = renewed(this._devices, devices, each =>
      this._deviceRow(each, waiting.get(each.id) ?? 0)
    );
    const outside = devices.flatMap(each => outsideUses(each));
    this._outside = renewed(this._outside, outside, each => this._outsideRow(each));
    this._groups = this._grouped(outside);
    this._note = this._noteText();
    this._shape = JSON.stringify([this._groups, this._note]);
  }

  private _sessionRow(session: Session, owner: string): ISessionRow {
    const { _trans: trans } = this;
    const can = (verb: 'suspend' | 'resume') => !obstacle(verb, session, trans);
    return {
      id: session.id,
      shown: shown(session),
      name: sessionName(session, trans),
      owner,
      word: stateWord(session, trans),
      pinned: session.pinned,
      memory: session.memory > 0 ? bytesText(session.memory) : '',
      device: session.device ? deviceName(session.device) : '',
      rank: isRank(session) ? trans.__('Rank %1', session.rank) : '',
      sentence: stateSentence(session, trans),
      action: can('suspend') ? 'suspend' : can('resume') ? 'resume' : null
    };
  }

  private _jobRow({ id, ranks }: IJob): IJobRow {
    const { _trans: trans } = this;
    const [first] = ranks;
    const memory = ranks.reduce((sum, each) => sum + each.memory, 0);
    return {
      id,
      name: sessionName(first, trans).replace(/ rank \d+$/, ''),
      count:
        ranks.length === first.ranks
          ? trans.__('%1 ranks', ranks.length)
          : trans.__('%1 of %2 ranks', ranks.length, first.ranks),
      memory: memory > 0 ? bytesText(memory) : ''
    };
  }

  private _deviceRow(device: Device, waiting: number): IDeviceRow {
    return {
      name: deviceName(device.id),
      used: usedPercent(device),
      occupancy: occupancyText(device),
      waiting,
      failure: device.failure
    };
  }

  private _outsideRow({ process, memory }: IOutsideUse): IOutsideRow {
    const { _trans: trans } = this;
    const notebook = this._model.sessions.find(each => process && each.kernel_pid === process.pid);
    const name = notebook
      ? sessionName(notebook, trans)
      : process?.command || (process ? trans.__('Process %1', process.pid) : trans.__('Others'));
    const text = memory === null ? trans.__('Memory') : bytesText(memory);
    const sentence = process
      ? trans.__('%1 is used outside of sessions, by process %2.', text, process.pid)
      : trans.__('%1 is used outside of sessions; the driver does not say by whom.', text);
    const memoryText = memory === null ? '' : bytesText(memory);
    return { name, owner: process?.user ?? '', memory: memoryText, sentence };
  }

  private _grouped(outside: readonly IOutsideUse[]): IGroup[] {
    const { devices, sessions } = this._model;
    const known = new Map(devices.map(each => [each.id, [] as Session[]]));
    const elsewhere: Session[] = [];
    sessions.forEach(each => (known.get(each.device ?? '') ?? elsewhere).push(each));
    const name = ({ id }: Session) => this._sessions.get(id)?.name ?? '';
    const ordered = (here: Session[]) =>
      here.sort(
        (a, b) =>
          name(a).localeCompare(name(b), undefined, { numeric: true }) || a.id.localeCompare(b.id)
      );
    const group = (device: string | null, here: Session[]): IGroup => ({
      device,
      sessions: entries(ordered(here)),
      outside: outside.filter(each => each.device === device).map(each => each.id)
    });
    const groups = [...known].map(([device, here]) => group(device, here));
    return elsewhere.length > 0 ? [...groups, group(null, elsewhere)] : groups;
  }

  private _noteText(): string {
    const { isReady, problem, sessions } = this._model;
    if (problem) {
      return isReady ? this._trans.__('%1 This list may be out of date.', problem) : problem;
    }
    if (!isReady) {
      return this._trans.__('Loading…');
    }
    return sessions.length > 0
      ? ''
      : this._trans.__('No GPU session yet. Run a cell that uses CUDA.');
  }

  private _sessions: ReadonlyMap<string, ISessionRow> = new Map();
  private _jobs: ReadonlyMap<string, IJobRow> = new Map();
  private _devices: ReadonlyMap<string, IDeviceRow> = new Map();
  private _outside: ReadonlyMap<string, IOutsideRow> = new Map();
  private _groups: readonly IGroup[] = [];
  private _note = '';
  private _shape = '';
}

/** Those ranks of a job that are on a device. */
interface IJob {
  readonly id: string;
  readonly ranks: Session[];
}

/** True if a session is one of several ranks of a job. */
function isRank(session: Session): boolean {
  return (session.ranks ?? 1) > 1;
}

/** Id of the row of a rank's job on the rank's device. */
function jobId({ device, owner, parent, job }: Session): string {
  return JSON.stringify([device, owner, parent, job]);
}

function jobsOf(sessions: readonly Session[]): IJob[] {
  const found = new Map<string, IJob>();
  for (const each of sessions.filter(isRank)) {
    const id = jobId(each);
    const job = found.get(id) ?? { id, ranks: [] };
    job.ranks.push(each);
    found.set(id, job);
  }
  return [...found.values()];
}

/** Nest the sessions of a device: below each those of processes that it started, ranks below jobs. */
function entries(here: readonly Session[]): IEntry[] {
  const known = new Set(here.map(each => each.id));
  const parentOf = ({ parent }: Session) => (known.has(parent) ? parent : '');
  const session = (each: Session): IEntry => {
    return { id: each.id, isJob: false, mine: isMine(each), below: below(each.id) };
  };
  const below = (parent: string): IEntry[] => {
    const siblings = here.filter(each => parentOf(each) === parent);
    const jobs = new Map(jobsOf(siblings).map(each => [each.id, each.ranks]));
    return siblings.flatMap(each => {
      if (!isRank(each)) {
        return [session(each)];
      }
      const id = jobId(each);
      const ranks = jobs.get(id) ?? []; // the job's row is where its first rank would be
      jobs.delete(id);
      const inOrder = ranks.sort((a, b) => (a.rank ?? 0) - (b.rank ?? 0)).map(session);
      return ranks.length > 0 ? [{ id, isJob: true, mine: false, below: inOrder }] : [];
    });
  };
  return below('');
}

/** Use of a device outside of sessions: by a process, or in total if the driver names none. */
interface IOutsideUse {
  readonly id: string;
  readonly device: string;
  /** Bytes; null if unknown. */
  readonly memory: number | null;
  readonly process: Outside['processes'][number] | null;
}

function outsideUses({ id: device, outside }: Device): IOutsideUse[] {
  if (!outside) {
    return [];
  }
  if (!outside.complete && outside.memory > 0) {
    return [{ id: `outside ${device}`, device, memory: outside.memory, process: null }];
  }
  return outside.processes.map(process => ({
    id: `outside ${device} ${process.pid}`,
    device,
    memory: process.memory,
    process
  }));
}

/** Return the rows of the current items; rows with the same text are reused. */
function renewed<T extends { readonly id: string }, Row extends object>(
  before: ReadonlyMap<string, Row>,
  found: readonly T[],
  row: (each: T) => Row
): ReadonlyMap<string, Row> {
  return new Map(
    found.map(each => {
      const [old, now] = [before.get(each.id), row(each)];
      return [each.id, old && same(old, now) ? old : now];
    })
  );
}

function same<Row extends object>(a: Row, b: Row): boolean {
  return (Object.keys(a) as (keyof Row)[]).every(key => a[key] === b[key]);
}
