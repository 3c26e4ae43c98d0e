import { Dialog, Notification } from '@jupyterlab/apputils';
import { nullTranslator } from '@jupyterlab/translation';
import { DisposableDelegate } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { SingError } from '../api/client';
import { aCheckpoint } from '../testing/checkpoints';
import { aSession } from '../testing/sessions';
import type { ISing, Session } from '../api/tokens';
import { CheckpointActions } from './actions';
import type { INotebooks } from './notebooks';
import type { CheckpointStore } from './store';

const trans = nullTranslator.load('');
const OUTCOME = {
  checkpoint: 'before-lunch',
  variables: 2,
  files: 1,
  aside: {},
  problems: [],
  form: 'namespace' as const
};
const here = { path: 'lessons/train.ipynb', kernelId: 'kernel-1' };

let sessions: Session[];
let choices: Record<string, boolean>;
let order: string[];
let changed: Signal<object, void>;
let restore: ReturnType<typeof vi.fn>;
let notebooks: Record<'create' | 'start' | 'restart', ReturnType<typeof vi.fn>>;
let store: Record<'during' | 'delete', ReturnType<typeof vi.fn>>;
let actions: CheckpointActions;

beforeEach(() => {
  vi.useFakeTimers();
  sessions = [aSession()];
  choices = { confirmRestore: false, confirmDelete: false };
  order = [];
  changed = new Signal<object, void>({});
  restore = vi.fn(async (id: string, name: string) => {
    order.push(`restore ${name} into ${id}`);
    return OUTCOME;
  });
  notebooks = {
    create: vi.fn(async () => {
      order.push('create');
      return 'lessons/train-Copy1.ipynb';
    }),
    start: vi.fn(async (path: string) => {
      order.push(`start ${path}`);
      return { path, kernelId: 'kernel-2' };
    }),
    restart: vi.fn(async () => {
      order.push('restart');
      sessions = [aSession({ id: 'session-2' })];
    })
  };
  store = {
    during: vi.fn((_verb, _name, work: () => Promise<unknown>) => work()),
    delete: vi.fn(async () => new Map())
  };
  const sing = {
    client: { restore },
    model: {
      changed,
      get: (id: string) => sessions.find(each => each.id === id),
      ofKernel: (id: string) => sessions.find(each => each.kernel_id === id),
      observe: () => new DisposableDelegate(() => undefined),
      refresh: vi.fn(async () => undefined)
    },
    settings: {
      get: (key: string) => choices[key],
      set: async (key: string, value: boolean) => void (choices[key] = value)
    }
  };
  actions = new CheckpointActions(
    sing as unknown as ISing,
    store as unknown as CheckpointStore,
    notebooks as unknown as INotebooks,
    trans
  );
});

afterEach(() => {
  Notification.dismiss();
  Dialog.flush();
  vi.useRealTimers();
});

const notifications = () => Notification.manager.notifications.map(each => each.message);

test('a restore into a notebook shows the restored contents', async () => {
  await actions.restore(aCheckpoint(), here);
  expect(order).toEqual(['restore before-lunch into session-1']);
  expect(notifications()).toEqual([
    'Restored 2 variables and 1 file from before-lunch into train.ipynb.'
  ]);
});

test('a notification of omissions stays, with details', async () => {
  restore.mockResolvedValueOnce({
    ...OUTCOME,
    problems: [{ name: 'frame', why: 'there is no module pandas', partly: false }]
  });
  await actions.restore(aCheckpoint(), here);
  const [notification] = Notification.manager.notifications;
  expect(notification.type).toBe('warning');
  expect(notification.options.autoClose).toBe(false);
  expect(notification.options.actions?.map(each => each.label)).toEqual(['Details']);
});

test('a slow restore shows progress, then its result', async () => {
  let answer: (outcome: unknown) => void = () => undefined;
  restore.mockReturnValueOnce(new Promise(resolve => (answer = resolve)));
  const restoring = actions.restore(aCheckpoint(), here);
  await vi.advanceTimersByTimeAsync(600);
  expect(notifications()).toEqual(['Restoring before-lunch into train.ipynb']);
  answer({ ...OUTCOME, form: 'process' });
  await restoring;
  expect(notifications()).toEqual([
    'Restored the process of before-lunch into train.ipynb, with 2 variables and 1 file.'
  ]);
});

test('a kernel whose session has ended is restarted first', async () => {
  sessions = [aSession({ state: 'failed' })];
  await actions.restore(aCheckpoint(), here);
  expect(order).toEqual(['restart', 'restore before-lunch into session-2']);
});

test('a restore into a new notebook waits for its GPU session', async () => {
  const restoring = actions.restoreIntoNew(aCheckpoint());
  await vi.advanceTimersByTimeAsync(1000);
  expect(order).toEqual(['create', 'start lessons/train-Copy1.ipynb']);
  sessions = [...sessions, aSession({ id: 'session-2', kernel_id: 'kernel-2' })];
  changed.emit();
  await restoring;
  expect(order.at(-1)).toBe('restore before-lunch into session-2');
  expect(notifications()).toEqual([
    'Restored 2 variables and 1 file from before-lunch into train-Copy1.ipynb.'
  ]);
});

test('a new notebook without a GPU session is an error', async () => {
  const restoring = actions.restoreIntoNew(aCheckpoint());
  await vi.advanceTimersByTimeAsync(60_000);
  await restoring;
  expect(restore).not.toHaveBeenCalled();
  expect(notifications()[0]).toContain('The kernel of train-Copy1.ipynb has no GPU session');
});

test('a notebook that cannot be created or started is an error, and nothing is restored', async () => {
  notebooks.create.mockRejectedValueOnce(new Error('No space left.'));
  await actions.restoreIntoNew(aCheckpoint());
  expect(notifications()).toEqual(['No space left.']);
  notebooks.start.mockResolvedValueOnce({ path: 'a.ipynb', kernelId: null });
  await actions.restoreIntoNew(aCheckpoint());
  expect(notifications()[0]).toBe('a.ipynb has no kernel. Select one first.');
  expect(restore).not.toHaveBeenCalled();
});

test('an error of the server is shown as it is', async () => {
  restore.mockRejectedValueOnce(new SingError('There is no checkpoint.', 'unknown-checkpoint'));
  await actions.restore(aCheckpoint(), here);
  expect(notifications()).toEqual(['There is no checkpoint.']);
});

test('a confirmation is shown unless it was switched off', async () => {
  choices.confirmRestore = true;
  const restoring = actions.restore(aCheckpoint(), here);
  await vi.advanceTimersByTimeAsync(10);
  const dialog = Dialog.tracker.currentWidget!;
  expect(dialog.node.textContent).toContain('Restore before-lunch into train.ipynb?');
  expect(dialog.node.textContent).toContain('This replaces the variables of train.ipynb');
  expect(dialog.node.textContent).toContain(
    'Only restore checkpoints made by you or someone you trust.'
  );
  dialog.node.querySelector<HTMLInputElement>('input[type="checkbox"]')!.click();
  dialog.resolve(1);
  await restoring;
  expect(restore).toHaveBeenCalledTimes(1);
  expect(choices.confirmRestore).toBe(false);
});

test('a cancelled restore changes nothing', async () => {
  choices = { confirmRestore: true, confirmDelete: true };
  for (const act of [
    () => actions.restore(aCheckpoint(), here),
    () => actions.restoreIntoNew(aCheckpoint()),
    () => actions.delete([aCheckpoint()])
  ]) {
    const acting = act();
    await vi.advanceTimersByTimeAsync(10);
    Dialog.tracker.currentWidget!.reject();
    await acting;
  }
  expect(order).toEqual([]);
  expect(store.delete).not.toHaveBeenCalled();
  expect(choices).toEqual({ confirmRestore: true, confirmDelete: true });
});

test('a failed deletion is shown', async () => {
  store.delete.mockResolvedValueOnce(new Map([['before-lunch', 'Another process reads it.']]));
  expect(await actions.delete([aCheckpoint()])).toBe(false);
  expect(notifications()).toEqual(['before-lunch was not deleted: Another process reads it.']);
});
