import type { Event } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { type SingClient, SingError } from '../api/client';
import { SingModel } from './model';
import { aDevice, aSession } from '../testing/sessions';
import { EVENT_SCHEMA } from '../api/tokens';

let stream: Signal<object, Event.Emission>;
let status: ReturnType<typeof vi.fn>;
let model: SingModel;

beforeEach(async () => {
  vi.useFakeTimers();
  stream = new Signal<object, Event.Emission>({});
  status = vi.fn(async () => ({ devices: [aDevice()], sessions: [aSession()], sharing: {} }));
  model = new SingModel({
    client: { status } as unknown as SingClient,
    events: { stream } as unknown as Event.IManager
  });
  await vi.advanceTimersByTimeAsync(100);
});

afterEach(() => {
  model.dispose();
  vi.useRealTimers();
});

function emit(event: object): void {
  stream.emit({ schema_id: EVENT_SCHEMA, ...event } as unknown as Event.Emission);
}

test('the status is requested once at the start, and not again without observers', async () => {
  expect(model.isReady).toBe(true);
  await vi.advanceTimersByTimeAsync(3_600_000);
  expect(status).toHaveBeenCalledTimes(1);
});

test('the status is requested regularly while there are observers', async () => {
  const observing = model.observe();
  await vi.advanceTimersByTimeAsync(35_000);
  expect(status.mock.calls.length).toBeGreaterThanOrEqual(4);
  observing.dispose();
  status.mockClear();
  await vi.advanceTimersByTimeAsync(3_600_000);
  expect(status).toHaveBeenCalledTimes(0);
});

test('events are applied without a request, and changes are emitted once a frame', async () => {
  const onChanged = vi.fn();
  model.changed.connect(onChanged);
  emit({ session: 'session-1', state: 'suspended', device: 'cpu:0', memory: 0, reason: 'Rests.' });
  emit({ session: 'session-1', pinned: true });
  await vi.advanceTimersByTimeAsync(20);
  expect(onChanged).toHaveBeenCalledTimes(1);
  expect(model.get('session-1')).toMatchObject({
    state: 'suspended',
    pinned: true,
    name: 'lessons/train.ipynb'
  });
  expect(model.devices[0].memory_used).toBe(0);
  expect(status).toHaveBeenCalledTimes(1);
});

test('a field that an event lacks is reset', async () => {
  const progress = { verb: 'restore', checkpoint: 'one', done: 1, total: 2 };
  emit({ session: 'session-1', state: 'running', progress });
  expect(model.get('session-1')?.progress).toEqual(progress);
  emit({ session: 'session-1', state: 'running' });
  expect(model.get('session-1')?.progress).toBeNull();
});

test('a new session causes a request, and an ended one is removed', async () => {
  emit({ session: 'session-2', kernel_id: 'kernel-2', state: 'idle', device: 'cpu:1' });
  await vi.advanceTimersByTimeAsync(100);
  expect(status).toHaveBeenCalledTimes(2);
  emit({ session: 'session-1', state: 'idle', ended: true });
  expect(model.ofKernel('kernel-1')).toBeUndefined();
});

test('events received during a request outlast its response', async () => {
  let answer: (value: unknown) => void = () => undefined;
  status.mockReturnValueOnce(new Promise(resolve => (answer = resolve)));
  model.invalidate();
  await vi.advanceTimersByTimeAsync(10);
  emit({ session: 'session-1', state: 'queued', device: 'cpu:0', queue_position: 2 });
  answer({ devices: [aDevice()], sessions: [aSession()], sharing: {} });
  await vi.advanceTimersByTimeAsync(100);
  expect(model.get('session-1')).toMatchObject({ state: 'queued', queue_position: 2 });
});

test('failed requests are retried, and the problem is shown meanwhile', async () => {
  status.mockRejectedValueOnce(
    new SingError('The Jupyter server cannot be reached.', 'unreachable')
  );
  model.invalidate();
  await vi.advanceTimersByTimeAsync(100);
  expect(model.problem).toBe('The Jupyter server cannot be reached.');
  await vi.advanceTimersByTimeAsync(120_000);
  expect(model.problem).toBe('');
  const calls = status.mock.calls.length;
  await vi.advanceTimersByTimeAsync(3_600_000);
  expect(status).toHaveBeenCalledTimes(calls);
});

test('events of other schemas are ignored', async () => {
  stream.emit({
    schema_id: 'https://example.org/other',
    session: 'session-1',
    state: 'failed'
  } as never);
  expect(model.get('session-1')?.state).toBe('running');
});
