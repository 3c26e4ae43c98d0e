import { Notification } from '@jupyterlab/apputils';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { fraction, PROGRESS_DELAY_MS, withProgress } from './progress';
import { FakeModel } from '../testing/model';
import { aSession } from '../testing/sessions';

const TEXTS = { doing: 'Saves a checkpoint…', done: (name: string) => `Is saved as ${name}.` };
const progress = (done: number, total: number) =>
  ({ verb: 'checkpoint', checkpoint: 'evening', done, total }) as const;

let model: FakeModel;

beforeEach(() => {
  vi.useFakeTimers();
  model = new FakeModel([], [aSession()]);
  // JupyterLab shows notifications as elements with their ids.
  Notification.manager.changed.connect(show);
});

afterEach(() => {
  Notification.dismiss();
  Notification.manager.changed.disconnect(show);
  document.body.replaceChildren();
  vi.useRealTimers();
});

function show(_: unknown, { type, notification }: Notification.IChange): void {
  if (type === 'added') {
    document.body.appendChild(document.createElement('div')).id = notification.id;
  }
}

const notifications = () =>
  Notification.manager.notifications.map(each => [each.type, each.message]);
const bar = () => document.querySelector('[role=progressbar]');

test('no notification is shown for work that ends at once', async () => {
  expect(await withProgress(model, 'session-1', Promise.resolve('evening'), TEXTS)).toBe('evening');
  await vi.advanceTimersByTimeAsync(10 * PROGRESS_DELAY_MS);
  expect(notifications()).toEqual([]);
});

test('work that takes longer has a progress bar', async () => {
  let end: (name: string) => void = () => undefined;
  const doing = withProgress(model, 'session-1', new Promise<string>(done => (end = done)), TEXTS);
  await vi.advanceTimersByTimeAsync(PROGRESS_DELAY_MS - 1);
  expect(notifications()).toEqual([]);
  await vi.advanceTimersByTimeAsync(20);
  expect(notifications()).toEqual([['in-progress', TEXTS.doing]]);
  expect(bar()?.getAttribute('aria-label')).toBe(TEXTS.doing);
  expect(bar()?.hasAttribute('aria-valuenow')).toBe(false);
  model.put(aSession({ progress: progress(25, 100) }));
  await vi.advanceTimersByTimeAsync(20);
  expect(bar()?.getAttribute('aria-valuenow')).toBe('25');
  end('evening');
  await doing;
  expect(notifications()).toEqual([['success', 'Is saved as evening.']]);
  expect(bar()).toBeNull();
});

test('an error replaces the notification of the work', async () => {
  let fail: (error: Error) => void = () => undefined;
  const never = new Promise<string>((_, reject) => (fail = reject));
  const doing = withProgress(model, 'session-1', never, TEXTS);
  await vi.advanceTimersByTimeAsync(PROGRESS_DELAY_MS + 20);
  fail(new Error('The disk is full.'));
  expect(await doing).toBeUndefined();
  expect(notifications()).toEqual([['error', 'The disk is full.']]);
});

test.each([
  [null, null],
  [progress(3, 0), null],
  [progress(3, 4), 0.75],
  [progress(5, 4), 1]
])('the progress of %j is %j', (known, expected) => {
  expect(fraction(aSession({ progress: known }))).toBe(expected);
});
