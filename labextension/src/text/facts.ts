import type { TranslationBundle } from '@jupyterlab/translation';
import { TRAITS } from '../api/states';
import type { Device, Session } from '../api/tokens';
import { momentText, occupancyText, durationText } from './format';
import { deviceName } from './words';

/** Return the neighbours of a session: other sessions with state on its device. */
export function neighbours(session: Session, sessions: readonly Session[]): Session[] {
  return sessions.filter(
    each => each.id !== session.id && each.device === session.device && isOnDevice(each)
  );
}

/**
 * True if a session uses memory on its device now; `device` alone only names the assigned device.
 */
export function isOnDevice(session: Session): boolean {
  return session.memory > 0 || TRAITS[session.state].executes === true;
}

/**
 * True if a session waits for others. One that takes turns with them has the device as they have.
 */
export function isWaiting(session: Session): boolean {
  return session.state === 'queued' && !session.shared;
}

/** Return how many sessions wait for a device, or for any. */
export function waitingCount(sessions: readonly Session[], device?: Device): number {
  return sessions.filter(
    each => isWaiting(each) && (device === undefined || each.device === device.id)
  ).length;
}

/**
 * Describe the turn of a waiting session: `You are next, about 4 s`.
 *
 * @param left - Seconds left of the expected wait, negative if it is overdue; null if unknown.
 */
export function queueText(position: number, left: number | null, trans: TranslationBundle): string {
  const place =
    position === 1 ? trans.__('You are next') : trans.__('Place %1 in the queue', position);
  if (left === null) {
    return place;
  }
  if (left < -OVERDUE_SECONDS) {
    return trans.__('%1; this takes longer than expected', place);
  }
  return left < 1
    ? trans.__('%1, any moment now', place)
    : trans.__('%1, about %2', place, durationText(left, trans));
}

/**
 * Return a sentence of the daemon without the turn that `queueText` describes, which changes often.
 */
export function withoutTurn(sentence: string): string {
  return sentence.replace(/ (?:You are next|Place \d+ in the queue)[^.]*\./, '');
}

/** Error of an estimate, in seconds, above which the wait is shown as overdue. */
const OVERDUE_SECONDS = 3;

/**
 * Describe the checkpoint from which a session's notebook can be restored: `Last checkpoint: 10:42,
 * automatic`.
 */
export function checkpointText(
  session: Session,
  now: Date,
  language: string | undefined,
  trans: TranslationBundle
): string {
  const last = session.last_checkpoint;
  if (!last) {
    return trans.__('No checkpoint yet');
  }
  const made = momentText(new Date(last.created), now, language);
  const how = last.automatic ? trans.__('automatic') : trans.__('by you');
  return last.earlier
    ? trans.__('Last checkpoint: %1, %2, from an earlier kernel', made, how)
    : trans.__('Last checkpoint: %1, %2', made, how);
}

/**
 * Describe what a session lacks of its tier's guarantee, if its state does not show it; or empty.
 */
export function shortfallText(session: Session, trans: TranslationBundle): string {
  const { shared, served_as: tier, promised } = session;
  return shared && promised === 0 && (tier === 'premium' || tier === 'standard')
    ? trans.__('Tier %1, without its guaranteed share: other sessions use all of it', tier)
    : '';
}

/**
 * Describe the memory use of devices, and how many sessions wait: `GPU 1: 12.0 GiB of 80.0 GiB · 2
 * waiting`.
 */
export function devicesText(
  devices: readonly Device[],
  waiting: number,
  trans: TranslationBundle
): string {
  const count = devices.length;
  const name =
    count === 1
      ? deviceName(devices[0].id)
      : devices.some(each => each.kind === 'cuda')
        ? trans._n('%1 GPU', '%1 GPUs', count, count)
        : trans._n('%1 simulated GPU', '%1 simulated GPUs', count, count);
  const all = devices.reduce((sum, each) => ({
    ...sum,
    memory_used: sum.memory_used + each.memory_used,
    memory_total: sum.memory_total + each.memory_total
  }));
  const text = trans.__('%1: %2', name, occupancyText(all));
  return waiting === 0
    ? text
    : trans.__('%1 · %2', text, trans._n('%1 waiting', '%1 waiting', waiting, waiting));
}

/** Return the longest texts of `devicesText` for these devices. */
export function devicesTextsMax(devices: readonly Device[], trans: TranslationBundle): string[] {
  const total = devices.reduce((sum, each) => sum + each.memory_total, 0);
  const [first, ...others] = devices.map(each => ({ ...each, memory_used: 0 }));
  // A fraction may be longer than the whole.
  return [1023.9 * 2 ** 20, total].map(memory_used =>
    devicesText([{ ...first, memory_used }, ...others], WAITING_MAX, trans)
  );
}

/** The longest queue whose number has reserved space. */
const WAITING_MAX = 9;
