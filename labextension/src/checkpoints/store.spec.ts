import { DisposableDelegate } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { type SingClient, SingError } from '../api/client';
import { aCheckpoint } from '../testing/checkpoints';
import { aSession } from '../testing/sessions';
import type { ISingModel, Session } from '../api/tokens';
import { CheckpointStore } from './store';

let sessions: Session[];
let observers: number;
let changed: Signal<object, void>;
let list: ReturnType<typeof vi.fn>;
let remove: ReturnType<typeof vi.fn>;
let store: CheckpointStore;

const last = (name: string) => ({
  name,
  created: '2026-01-01T12:00:00.000+00:00',
  automatic: false,
  earlier: false,
  died: false
});

beforeEach(() => {
  vi.useFakeTimers();
  sessions = [aSession()];
  observers = 0;
  changed = new Signal<object, void>({});
  list = vi.fn(async () => [aCheckpoint()]);
  remove = vi.fn(async () => undefined);
  const model = {
    changed,
    get sessions() {
      return sessions;
    },
    observe() {
      observers++;
      return new DisposableDelegate(() => observers--);
    }
  };
  store = new CheckpointStore(
    { checkpoints: list, deleteCheckpoint: remove } as unknown as SingClient,
    model as unknown as ISingModel
  );
});

afterEach(() => {
  store.dispose();
  vi.useRealTimers();
});

/** Change the session in the model. */
async function update(overrides: Partial<Session>): Promise<void> {
  sessions = [aSession(overrides)];
  changed.emit();
  await vi.advanceTimersByTimeAsync(1);
}

async function watched(): Promise<void> {
  store.isWatched = true;
  await vi.advanceTimersByTimeAsync(1);
}

test('nothing is requested while the view is hidden', async () => {
  await update({ last_checkpoint: last('one') });
  await watched();
  store.isWatched = false;
  await update({ last_checkpoint: last('two') });
  await vi.advanceTimersByTimeAsync(3_600_000);
  expect(list).toHaveBeenCalledTimes(1);
  expect(observers).toBe(0);
});

test('the list is requested again after a checkpoint was saved', async () => {
  await watched();
  expect(store.all.map(each => each.name)).toEqual(['before-lunch']);
  await update({ state: 'suspended' });
  expect(list).toHaveBeenCalledTimes(1);
  await update({ last_checkpoint: last('one') });
  expect(list).toHaveBeenCalledTimes(2);
});

test('a checkpoint that is being saved is shown until the list contains it', async () => {
  await watched();
  await update({ progress: { verb: 'checkpoint', checkpoint: 'new', done: 1, total: 4 } });
  expect(store.arriving).toEqual([{ name: 'new', session: 'lessons/train.ipynb' }]);
  expect(store.doing('new')).toMatchObject({ verb: 'checkpoint', done: 0.25 });
  let answer: (value: unknown) => void = () => undefined;
  list.mockReturnValueOnce(new Promise(resolve => (answer = resolve)));
  await update({ progress: null });
  expect(store.arriving.map(each => each.name)).toEqual(['new']);
  answer([aCheckpoint({ name: 'new' }), aCheckpoint()]);
  await vi.advanceTimersByTimeAsync(1);
  expect(store.arriving).toEqual([]);
  expect(store.all.map(each => each.name)).toEqual(['new', 'before-lunch']);
});

test('a checkpoint that could not be saved is removed', async () => {
  await watched();
  await update({ progress: { verb: 'checkpoint', checkpoint: 'new', done: 1, total: 4 } });
  await update({ progress: null });
  expect(store.arriving).toEqual([]);
});

test('long work is shown after half a second', async () => {
  let answer: (value: unknown) => void = () => undefined;
  list.mockReturnValueOnce(new Promise(resolve => (answer = resolve)));
  await watched();
  await vi.advanceTimersByTimeAsync(400);
  expect(store.working).toBeNull();
  await vi.advanceTimersByTimeAsync(200);
  expect(store.working).toEqual({ done: null });
  answer([]);
  await vi.advanceTimersByTimeAsync(1);
  expect(store.working).toBeNull();
});

test('a failed request keeps the list, and the next one clears the problem', async () => {
  await watched();
  list.mockRejectedValueOnce(new SingError('The daemon does not answer.', 'unavailable'));
  await store.refresh();
  expect(store.problem).toBe('The daemon does not answer.');
  expect(store.all).toHaveLength(1);
  await store.refresh();
  expect(store.problem).toBe('');
});

test('deletions run one after the other, and failures are listed', async () => {
  await watched();
  remove.mockRejectedValueOnce(new SingError('Another process reads it.', 'busy'));
  const failed = await store.delete(['other', 'before-lunch']);
  expect([...failed]).toEqual([['other', 'Another process reads it.']]);
  expect(remove.mock.calls).toEqual([['other'], ['before-lunch']]);
  await vi.advanceTimersByTimeAsync(1);
  expect(list).toHaveBeenCalledTimes(2); // the sizes of others may have grown
});

test('simultaneous requests are merged, and a later one follows', async () => {
  await watched();
  list.mockClear();
  await Promise.all([store.refresh(), store.refresh(), store.refresh()]);
  expect(list).toHaveBeenCalledTimes(2);
});
