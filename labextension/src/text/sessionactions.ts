import type { TranslationBundle } from '@jupyterlab/translation';
import { TRAITS } from '../api/states';
import type { Device, Session } from '../api/tokens';
import { deviceName } from './words';

/** Actions on a session. */
export type Verb = 'suspend' | 'resume' | 'migrate' | 'checkpoint' | 'pin';

/** True if a session is this user's: for other users' sessions the server sends no reason. */
export function isMine(session: Session): boolean {
  return session.reason !== '';
}

/**
 * Why an action on a session is not possible now, in a sentence; empty if it is.
 *
 * @param session - The kernel's session, if it has one.
 */
export function obstacle(
  verb: Verb,
  session: Session | undefined,
  trans: TranslationBundle
): string {
  if (session === undefined) {
    return trans.__('There is no GPU session here.');
  }
  if (!isMine(session)) {
    return trans.__('This session belongs to %1.', session.owner || trans.__('another user'));
  }
  if (session.state === 'failed') {
    return trans.__('This session has ended.');
  }
  if (verb !== 'pin' && session.progress) {
    return unfinished(trans)[session.progress.verb];
  }
  return verb === 'pin' || verb === 'checkpoint' ? '' : stateObstacle(verb, session, trans);
}

/** Work that must end before another action is possible. */
const unfinished = (trans: TranslationBundle) => ({
  restore: trans.__('A checkpoint is being restored.'),
  checkpoint: trans.__('A checkpoint is being saved.'),
  prepare: trans.__('GPU support is being compiled.')
});

/** Why a session's state does not allow moving it onto, off or between devices. */
function stateObstacle(
  verb: Verb,
  { state, worker_pid: worker }: Session,
  trans: TranslationBundle
): string {
  if (TRAITS[state].isTransition) {
    return state === 'migrating'
      ? trans.__('It is migrating to another GPU.')
      : trans.__('It is resuming.');
  }
  if (verb === 'suspend' && state === 'suspended') {
    return trans.__('It is already suspended.');
  }
  if (verb === 'suspend' && state === 'idle' && worker === null) {
    return trans.__('It does not use a GPU yet.');
  }
  if (verb === 'resume' && state !== 'suspended') {
    return state === 'queued'
      ? trans.__('It is waiting for its turn.')
      : trans.__('It is not suspended.');
  }
  return '';
}

/** Memory that a session would find on a device. */
export type Capacity = 'here' | 'free' | 'full' | 'small';

/** Return whether a device has free memory for a session. */
export function capacityOn(device: Device, session: Session): Capacity {
  if (device.id === session.device) {
    return 'here';
  }
  if (session.memory > device.memory_total) {
    return 'small';
  }
  return session.memory > device.memory_total - device.memory_used ? 'full' : 'free';
}

/** The same in a few words. */
export function capacityText(capacity: Capacity, trans: TranslationBundle): string {
  switch (capacity) {
    case 'here':
      return trans.__('current GPU');
    case 'free':
      return trans.__('free');
    case 'full':
      return trans.__('full: other sessions are suspended first');
    case 'small':
      return trans.__('too small');
  }
}

/** Return the most likely target of a migration: the emptiest device with enough memory. */
export function likelyTarget(devices: readonly Device[], session: Session): Device | undefined {
  const free = (device: Device) => device.memory_total - device.memory_used;
  const order: Capacity[] = ['free', 'full'];
  return devices
    .filter(each => order.includes(capacityOn(each, session)))
    .sort(
      (a, b) =>
        order.indexOf(capacityOn(a, session)) - order.indexOf(capacityOn(b, session)) ||
        free(b) - free(a)
    )[0];
}

/** Return a name for a new checkpoint of a session: notebook and time. */
export function checkpointName(session: Session, now: Date): string {
  const stem = (session.name.split('/').pop() ?? '')
    .replace(/\.ipynb$/, '')
    .replace(/[^A-Za-z0-9]+/g, '-')
    .replace(/^-+|-+$/g, '')
    .slice(0, 60);
  const two = (value: number) => String(value).padStart(2, '0');
  const day = `${now.getFullYear()}${two(now.getMonth() + 1)}${two(now.getDate())}`;
  const time = `${two(now.getHours())}${two(now.getMinutes())}`;
  return `${stem || 'notebook'}-${day}-${time}`;
}

/** Describe the device to which a session was moved, in a sentence. */
export function movedText(session: Session, name: string, trans: TranslationBundle): string {
  return trans.__('%1 is now on %2.', name, session.device ? deviceName(session.device) : '');
}
