import type { TranslationBundle } from '@jupyterlab/translation';
import type { Shown } from './icons';
import type { Device, Session } from './tokens';

/** What a state is read from: of a session, or of a part of its past. */
type Stated = Pick<Session, 'state'> & Partial<Pick<Session, 'queue_position'>>;

/** What to show of a kernel's session, if it has one. */
export function shown(session: Stated | undefined): Shown {
  return session?.state ?? 'cpu';
}

/** The word for a state: `Queued (2)`. */
export function stateWord(session: Stated | undefined, trans: TranslationBundle): string {
  switch (shown(session)) {
    case 'running':
      return trans.__('Running');
    case 'idle':
      return trans.__('Idle');
    case 'queued':
      return session?.queue_position
        ? trans.__('Queued (%1)', session.queue_position)
        : trans.__('Queued');
    case 'suspended':
      return trans.__('Suspended');
    case 'restoring':
      return trans.__('Restoring');
    case 'migrating':
      return trans.__('Migrating');
    case 'failed':
      return trans.__('Error');
    case 'cpu':
      return trans.__('CPU only');
  }
}

/** What happens next, in a sentence; other users' sessions say nothing of it themselves. */
export function stateSentence(session: Session | undefined, trans: TranslationBundle): string {
  if (session === undefined) {
    return trans.__('This kernel has no device session: it computes on the CPU.');
  }
  return session.reason || trans.__('Is used by %1.', session.owner || trans.__('another user'));
}

/** A number of bytes: `1.5 GB`, in the units in which memory is sold and named. */
export function bytesText(count: number): string {
  let value = count;
  for (const unit of ['B', 'KB', 'MB']) {
    if (value < 1024) {
      return `${unit === 'B' ? value : digits(value)} ${unit}`;
    }
    value /= 1024;
  }
  return `${digits(value)} GB`;
}

/** Use and size of a device's memory, with one unit for both: `1.2/2 GB`. */
export function occupancyText(device: Device): string {
  const unit = 2 ** 30;
  return `${digits(device.memory_used / unit)}/${digits(device.memory_total / unit)} GB`;
}

/** How much of a device's memory is in use, in percent. */
export function usedPercent(device: Device): number {
  const { memory_total: total, memory_used: used } = device;
  return total > 0 ? Math.min(100, Math.round((100 * used) / total)) : 0;
}

function digits(value: number): string {
  return value >= 10 ? value.toFixed(0) : String(Number(value.toFixed(value < 0.1 ? 2 : 1)));
}

/** A time: `4 s`, `3 min`. */
export function secondsText(seconds: number, trans: TranslationBundle): string {
  if (seconds < 1) {
    return trans.__('less than 1 s');
  }
  return seconds < 90
    ? trans.__('%1 s', Math.round(seconds))
    : seconds < 5400
      ? trans.__('%1 min', Math.round(seconds / 60))
      : trans.__('%1 h', Number((seconds / 3600).toFixed(1)));
}

/** What people call a session: its notebook's name, without directories. */
export function sessionName(
  session: Pick<Session, 'name' | 'owner'>,
  trans: TranslationBundle
): string {
  const name = session.name.split('/').pop();
  return name || trans.__('A session of %1', session.owner || trans.__('another user'));
}

/** A device's short name: `GPU 1`; software devices are called by their ids. */
export function deviceName(id: string): string {
  const [kind, number] = id.split(':');
  return kind === 'cuda' ? `GPU ${number}` : id;
}
