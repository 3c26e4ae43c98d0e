import { Signal } from '@lumino/signaling';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import type { ISingModel } from '../../api/tokens';
import type { Activity } from './data';
import { ActivityPoller, withDetail } from './activitypoller';

let model: { changed: Signal<object, void> };
let activity: ReturnType<typeof vi.fn>;
let poller: ActivityPoller;

beforeEach(() => {
  vi.useFakeTimers({ now: 1_800_000_000_000 });
  model = { changed: new Signal<object, void>({}) };
  activity = vi.fn(
    async (since: number): Promise<Activity> =>
      ({ since, until: Date.now() / 1000, devices: [], events: [] }) as unknown as Activity
  );
  poller = new ActivityPoller({ activity } as never, model as unknown as ISingModel);
});

afterEach(() => {
  poller.dispose();
  vi.useRealTimers();
});

const now = () => Date.now() / 1000;

async function shown(): Promise<void> {
  poller.show({ start: now() - 3600, end: now() }, 3600);
  poller.isVisible = true;
  await vi.advanceTimersByTimeAsync(5000);
}

test('nothing is requests while nobody looks', async () => {
  model.changed.emit();
  poller.show({ start: now() - 300, end: now() }, 800);
  await vi.advanceTimersByTimeAsync(600_000);
  expect(activity).not.toHaveBeenCalled();
});

test('a day is requests for, then what is looked at more exactly, then nothing', async () => {
  await shown();
  const requests = activity.mock.calls.map(([since, resolution]) => [
    Math.round((1_800_000_000 - since) / 100) * 100,
    resolution
  ]);
  expect(requests).toEqual([
    [86_400, 16],
    [3600, 1]
  ]);
  await vi.advanceTimersByTimeAsync(3_600_000);
  expect(activity).toHaveBeenCalledTimes(2);
});

test('many changes are followed by one question for what is new', async () => {
  await shown();
  activity.mockClear();
  const { until } = poller.record!;
  for (let count = 0; count < 50; count++) {
    model.changed.emit();
    await vi.advanceTimersByTimeAsync(20);
  }
  await vi.advanceTimersByTimeAsync(10_000);
  expect(activity).toHaveBeenCalledTimes(1);
  expect(activity.mock.calls[0][0]).toBeGreaterThan(until - 10);
});

test('what changes while nobody looks is requests for when somebody does again', async () => {
  await shown();
  activity.mockClear();
  poller.isVisible = false;
  model.changed.emit();
  await vi.advanceTimersByTimeAsync(600_000);
  expect(activity).not.toHaveBeenCalled();
  poller.isVisible = true;
  await vi.advanceTimersByTimeAsync(100);
  expect(activity).toHaveBeenCalledTimes(1);
});

test('a failure is told, and what is known is kept', async () => {
  await shown();
  const { record } = poller;
  activity.mockRejectedValueOnce(new Error('The server is away.'));
  model.changed.emit();
  await vi.advanceTimersByTimeAsync(2000);
  expect(poller.problem).toBe('The server is away.');
  expect(poller.record).toBe(record);
  poller.retry();
  await vi.advanceTimersByTimeAsync(100);
  expect(poller.problem).toBe('');
});

test('after a failure it is requests again by itself, and not once it is disposed', async () => {
  activity.mockRejectedValueOnce(new Error('The server is away.'));
  await shown();
  expect(poller.record).toBeNull();
  await vi.advanceTimersByTimeAsync(20_000);
  expect(poller.record).not.toBeNull();
  activity.mockClear();
  poller.dispose();
  poller.isVisible = true;
  await vi.advanceTimersByTimeAsync(600_000);
  expect(activity).not.toHaveBeenCalled();
});

test('the present is that of the server', async () => {
  activity.mockImplementation(async (since: number) => ({
    since,
    until: Date.now() / 1000 + 100,
    devices: [],
    events: []
  }));
  await shown();
  expect(poller.now()).toBeCloseTo(Date.now() / 1000 + 100, 1);
});

test('what is known more exactly later does not make what was before more exact', () => {
  const coarse = withDetail([], { since: 0, resolution: 60 });
  const both = withDetail(coarse, { since: 100, resolution: 2 });
  expect(both).toHaveLength(2);
  expect(withDetail(both, { since: 200, resolution: 2 })).toEqual(both);
  expect(withDetail(both, { since: 50, resolution: 1 })).toEqual([
    { since: 0, resolution: 60 },
    { since: 50, resolution: 1 }
  ]);
});
