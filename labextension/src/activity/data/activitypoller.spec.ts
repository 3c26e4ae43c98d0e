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

test('nothing is requested while the view is hidden', async () => {
  model.changed.emit();
  poller.show({ start: now() - 300, end: now() }, 800);
  await vi.advanceTimersByTimeAsync(600_000);
  expect(activity).not.toHaveBeenCalled();
});

test('the first request is for a day, the next for the shown part at a finer resolution', async () => {
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

test('many changes cause one request for new data', async () => {
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

test('changes while the view is hidden are requested when it is shown again', async () => {
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

test('a failure is shown, and the record is kept', async () => {
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

test('a failed request is retried, but not after disposal', async () => {
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

test('the present is the time of the server', async () => {
  activity.mockImplementation(async (since: number) => ({
    since,
    until: Date.now() / 1000 + 100,
    devices: [],
    events: []
  }));
  await shown();
  expect(poller.now()).toBeCloseTo(Date.now() / 1000 + 100, 1);
});

test('a finer later part leaves the earlier part coarse', () => {
  const coarse = withDetail([], { since: 0, resolution: 60 });
  const both = withDetail(coarse, { since: 100, resolution: 2 });
  expect(both).toHaveLength(2);
  expect(withDetail(both, { since: 200, resolution: 2 })).toEqual(both);
  expect(withDetail(both, { since: 50, resolution: 1 })).toEqual([
    { since: 0, resolution: 60 },
    { since: 50, resolution: 1 }
  ]);
});
