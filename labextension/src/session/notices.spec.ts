import type { JupyterFrontEnd } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { CommandRegistry } from '@lumino/commands';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { notices } from './notices';
import { SingSettings } from '../model/settings';
import type { ISessionEvent } from '../api/stream';
import { FakeModel } from '../testing/model';
import { aSession } from '../testing/sessions';
import { CommandIDs, type ISing } from '../api/tokens';

let model: FakeModel;
let settings: SingSettings;
let restored: ReturnType<typeof vi.fn>;
let resumed: ReturnType<typeof vi.fn>;

beforeEach(() => {
  model = new FakeModel([], [aSession()]);
  settings = new SingSettings(null);
  restored = vi.fn();
  resumed = vi.fn();
  const commands = new CommandRegistry();
  commands.addCommand(CommandIDs.restore, { execute: restored });
  commands.addCommand(CommandIDs.resume, { execute: resumed });
  const sing = { client: {}, model, settings } as unknown as ISing;
  notices.activate({ commands } as unknown as JupyterFrontEnd, sing, null);
});

afterEach(() => Notification.dismiss());

const notifications = () =>
  Notification.manager.notifications.map(each => [each.type, each.message]);

function emit(event: ISessionEvent): void {
  const { session, ...changes } = event;
  const before = model.get(session);
  if (before && !event.ended) {
    model.put({ ...before, ...changes });
  } else {
    model.sessions = model.sessions.filter(each => each.id !== session);
  }
  model.eventReceived.emit(event);
  model.changed.emit();
}

const DIED = {
  session: 'session-1',
  kernel_id: 'kernel-1',
  state: 'failed',
  reason: 'Its kernel died. Run %sing restore evening to restore the last checkpoint.',
  checkpoint: 'evening',
  command: '%sing restore evening'
} as const;

/** Press the button of the newest notification. */
function press(): void {
  const [{ options }] = Notification.manager.notifications;
  options.actions![0].callback(new MouseEvent('click'));
}

test('a checkpoint is restored into the next kernel of a notebook whose kernel died', () => {
  emit({ session: 'session-1', ended: true });
  emit(DIED);
  expect(notifications()).toEqual([
    ['warning', 'The kernel of train.ipynb died. Restore checkpoint evening to continue.']
  ]);
  press();
  expect(restored).not.toHaveBeenCalled();
  model.put(aSession({ id: 'session-2', state: 'idle' }));
  expect(restored.mock.calls[0][0]).toEqual({ session: 'session-2', name: 'evening' });
  model.put(aSession({ id: 'session-3', kernel_id: 'kernel-1' }));
  expect(restored).toHaveBeenCalledTimes(1);
});

test('dismissing the notification cancels the restore', () => {
  emit({ session: 'session-1', ended: true });
  emit(DIED);
  press();
  Notification.dismiss(Notification.manager.notifications[0].id);
  model.put(aSession({ id: 'session-2' }));
  expect(restored).not.toHaveBeenCalled();
});

test.each([
  // state before, pinned, event's state and reason, and the kind of notification
  ['running', false, 'failed', 'Its device process died.', 'error'],
  ['running', false, 'suspended', 'Made room for b.ipynb. Resumes on request.', 'warning'],
  ['idle', true, 'suspended', 'The device is gone. Resumes when you run a cell.', 'warning'],
  ['running', false, 'suspended', 'Paused by ada, 09:12, in the middle of a cell.', 'warning'],
  ['running', false, 'suspended', 'Suspended in JupyterLab. Resumes on request.', undefined],
  ['idle', false, 'suspended', 'Not used for 10 minutes. Resumes when you run a cell.', undefined],
  ['running', false, 'queued', 'Waiting for its turn.', undefined]
] as const)(
  'a session that was %s (pinned: %s) and is %s now: %s',
  (before, pinned, state, reason, type) => {
    model.put(aSession({ state: before, pinned }));
    // The change of the model comes after the event.
    model.sessions = [aSession({ state, pinned, reason })];
    model.eventReceived.emit({ session: 'session-1', state, reason });
    expect(notifications()).toEqual(type ? [[type, `train.ipynb: ${reason}`]] : []);
  }
);

test('a notification names who paused the notebook, and offers to resume it', () => {
  model.put(aSession({ state: 'idle' }));
  const reason = 'Suspended by root, 09:12. Resumes when you run the next cell.';
  const now = { state: 'suspended', suspended_by: 'root', reason } as const;
  model.sessions = [aSession(now)];
  model.eventReceived.emit({ session: 'session-1', ...now });
  expect(notifications()).toEqual([['warning', `train.ipynb: ${reason}`]]);
  press();
  expect(resumed.mock.calls[0][0]).toEqual({ session: 'session-1' });
});

test("no notification is shown for other users' sessions, or if switched off", async () => {
  model.put(aSession({ reason: '', owner: 'bob' }));
  model.eventReceived.emit({ session: 'session-1', state: 'failed', reason: '' });
  await settings.set('notifications', false);
  model.eventReceived.emit(DIED);
  expect(notifications()).toEqual([]);
});
