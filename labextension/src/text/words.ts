import type { TranslationBundle } from '@jupyterlab/translation';
import type { Shown } from '../ui/icons';
import type { Session } from '../api/tokens';
import { durationText, momentText, percentText } from './format';

/** Properties from which a state is read: of a session, or of a part of its past. */
type Stated = Pick<Session, 'state'> &
  Partial<Pick<Session, 'queue_position' | 'shared' | 'progress'>>;

/** Return what to show for a kernel's session, if it has one. */
export function shown(session: Stated | undefined): Shown {
  // A session that takes turns is shown as sharing, not by its turn: that changes every second or
  // two.
  return session?.shared ? 'running' : (session?.state ?? 'cpu');
}

function queuedWord(place: number, trans: TranslationBundle): string {
  return place === 1 ? trans.__('Queued, next') : trans.__('Queued, place %1', place);
}

/** Text in place of a state while the server does not answer. */
export function unreachableWord(trans: TranslationBundle): string {
  return trans.__('Server unreachable');
}

/** The word for a state: `Queued, next`. */
export function stateWord(session: Stated | undefined, trans: TranslationBundle): string {
  if (session?.shared) {
    return trans.__('Sharing');
  }
  switch (shown(session)) {
    case 'running':
      return trans.__('Running');
    case 'idle':
      return trans.__('Idle');
    case 'queued':
      return session?.queue_position
        ? queuedWord(session.queue_position, trans)
        : trans.__('Queued');
    case 'suspended':
      return trans.__('Suspended');
    case 'restoring':
      return trans.__('Restoring');
    case 'migrating':
      return trans.__('Migrating');
    case 'failed':
      return trans.__('Error');
    case 'preparing':
      return session?.progress?.total
        ? trans.__('Preparing, %1 of %2', session.progress.done, session.progress.total)
        : trans.__('Preparing');
    case 'cpu':
      return trans.__('CPU only');
    case 'unreachable':
      return unreachableWord(trans);
  }
}

/**
 * Describe what happens next, in a sentence; other users' sessions have no sentence of their own.
 */
export function stateSentence(session: Session | undefined, trans: TranslationBundle): string {
  if (session === undefined) {
    return trans.__('This kernel has no GPU session: it runs on the CPU.');
  }
  if (session.shared) {
    const next = turnText(session.queue_position, session.expected_wait, trans);
    return [sharingText(session.shared, trans), shareText(session.shared, trans), next].join(' · ');
  }
  return session.reason
    ? escaped(readable(session.reason).replace(/[\n\r\t]+/g, ' '))
    : trans.__('In use by %1.', session.owner || trans.__('another user'));
}

/**
 * Return a name with control characters and characters that change the text direction escaped, as
 * in the command line (`escaped` of `kernelproxy/common/readable.py`).
 */
export function escaped(text: string): string {
  return text.replace(CONTROL, found => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${hex(code, 2)}` : `\\u${hex(code, 4)}`;
  });
}

const CONTROL = /[\p{Cc}\u2028\u2029\u202a-\u202e\u2066-\u2069\p{Cs}]/gu;

function hex(code: number, digits: number): string {
  return code.toString(16).padStart(digits, '0');
}

/** Describe with whom a session takes turns: `Sharing GPU 1 with bob and 1 more`. */
export function sharingText(
  { devices, with: others }: NonNullable<Session['shared']>,
  trans: TranslationBundle
): string {
  const where =
    devices.length === 1
      ? deviceName(devices[0])
      : trans._n('%1 GPU', '%1 GPUs', devices.length, devices.length);
  const more = others.length - 1;
  const first = escaped(others[0]);
  const whom = more > 0 ? trans._n('%2 and %1 more', '%2 and %1 more', more, first) : first;
  return trans.__('Sharing %1 with %2', where, whom);
}

/** Describe a session's share of what it shares: `my share 50 %`. */
export function shareText(
  { share }: NonNullable<Session['shared']>,
  trans: TranslationBundle
): string {
  return trans.__('my share %1', percentText(share, trans));
}

/**
 * Describe the turn of a session that takes turns.
 *
 * @param place - Place among the waiting sessions; null if it is its turn.
 * @param left - Seconds; null if unknown.
 */
export function turnText(
  place: number | null | undefined,
  left: number | null | undefined,
  trans: TranslationBundle
): string {
  if (place == null) {
    return trans.__('running now');
  }
  if (left == null) {
    return trans.__('waiting for the next turn');
  }
  return left < 1
    ? trans.__('next turn any moment now')
    : trans.__('next turn in about %1', durationText(left, trans));
}

/** Return a sentence to show beside the word for the state, without repeating that word. */
export function sentenceBeside(word: string, sentence: string): string {
  return sentence.startsWith(`${word}. `) ? sentence.slice(word.length + 2) : sentence;
}

/**
 * Return a sentence of the daemon in user-facing form: its UTC times (`2026-11-23T09:12Z`) become
 * times of the browser's clock, with the date if it is another day.
 */
export function readable(sentence: string, now = new Date(), language = pageLanguage()): string {
  return sentence.replace(MOMENT, found => momentText(new Date(found), now, language));
}

const MOMENT = /\b\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)/g;

/** The language of the page. */
function pageLanguage(): string | undefined {
  return document.documentElement.lang || undefined;
}

/** User-facing name of a session: its notebook's name, without directories. */
export function sessionName(
  session: Pick<Session, 'name' | 'owner'>,
  trans: TranslationBundle
): string {
  const name = session.name.split('/').pop();
  return (
    (name && escaped(name)) || trans.__('Session of %1', session.owner || trans.__('another user'))
  );
}

/** User-facing name of a device: `GPU 1`, `Simulated GPU 0`. */
export function deviceName(id: string): string {
  const [kind, number] = id.split(':');
  return kind === 'cuda' ? `GPU ${number}` : kind === 'cpu' ? `Simulated GPU ${number}` : id;
}
