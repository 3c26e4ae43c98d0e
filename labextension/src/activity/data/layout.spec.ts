import { expect, test } from 'vitest';
import { aDay, randomOf } from '../../testing/activity';
import { greatest, type ActivityEvent, type Span } from './data';
import {
  barsAt,
  curveOf,
  itemsOf,
  laneOf,
  SessionStyles,
  marksOf,
  rowsOf,
  spaced,
  spansAt
} from './layout';
import {
  panned,
  type IWindow,
  rangeOf,
  showing,
  tickSeconds,
  ticks,
  toMoment,
  toPixel,
  zoomed
} from './range';

const NOW = 1_800_000_000;
const DAY = 86_400;
const day = aDay({ until: NOW, devices: 8, spanCount: 5000 });

function aSpan(session: string, start: number, end: number): Span {
  return { session, name: '', owner: '', state: 'running', start, end } as Span;
}

function anEvent(
  at: number,
  kind: ActivityEvent['kind'] = 'resumed',
  device = 'cuda:0'
): ActivityEvent {
  return { at, kind, session: 's', name: '', owner: '', device, text: '' };
}

test('spans of a row do not overlap', () => {
  for (const { held } of day.devices) {
    const { of, count } = rowsOf(held, day.until);
    const ends = Array<number>(count).fill(0);
    held.forEach((span, index) => {
      expect(span.start).toBeGreaterThanOrEqual(ends[of[index]] - 1e-3);
      ends[of[index]] = span.end;
    });
  }
});

test('sessions that take turns share a row, and keep it', () => {
  const turns = [aSpan('a', 0, 10), aSpan('b', 10, 20), aSpan('a', 20, 30)];
  expect(rowsOf(turns, 100)).toEqual({ of: [0, 0, 0], count: 1 });
  const both = [aSpan('a', 0, 15), aSpan('b', 10, 20), aSpan('b', 30, 40), aSpan('a', 31, 35)];
  expect(rowsOf(both, 100)).toEqual({ of: [0, 1, 1, 0], count: 2 });
  expect(rowsOf([], 100)).toEqual({ of: [], count: 1 });
});

test.each([300, 3600, 6 * 3600, DAY])('in %i s there are not more bars than pixels', seconds => {
  const random = randomOf(seconds);
  for (const { held } of day.devices) {
    const rows = rowsOf(held, day.until);
    const start = NOW - DAY + random() * (DAY - seconds);
    const range = { start, end: start + seconds };
    const width = 800;
    const bars = barsAt(held, rows, range, width, day.until, NOW);
    expect(bars.length).toBeLessThanOrEqual(rows.count * width);
    const right = Array<number>(rows.count).fill(-Infinity);
    for (const bar of bars) {
      expect(bar.left).toBeGreaterThanOrEqual(-2);
      expect(bar.right).toBeGreaterThan(bar.left);
      expect(bar.left).toBeGreaterThanOrEqual(right[bar.row] - 2.5);
      right[bar.row] = bar.right;
    }
    const inView = held.some(span => span.start < range.end && span.end > range.start);
    expect(bars.length > 0).toBe(inView);
  }
});

test('pixels and moments convert back to each other', () => {
  const range = { start: 100, end: 200 };
  expect(toPixel(150, range, 500)).toBe(250);
  expect(toMoment(toPixel(173, range, 640), range, 640)).toBeCloseTo(173);
});

test('the hit test finds the drawn spans', () => {
  const held = [aSpan('a', 0, 10), aSpan('b', 5, 20)];
  const rows = rowsOf(held, 100);
  expect(spansAt(held, rows, 0, { start: 7, end: 7 }, 100, 100)).toEqual([0]);
  expect(spansAt(held, rows, 1, { start: 7, end: 7 }, 100, 100)).toEqual([1]);
  expect(spansAt(held, rows, 0, { start: 12, end: 12 }, 100, 100)).toEqual([]);
});

test('a curve keeps its peaks, and ends where it does', () => {
  const range = { start: 0, end: 1000 };
  const steps = [
    [0, 0],
    [500, 1],
    [500.1, 9],
    [500.2, 0]
  ];
  expect(curveOf(steps, range, 100, 1000)).toEqual([
    [0, 0],
    [50, 9],
    [51, 0]
  ]);
  expect(curveOf([[-50, 3]], range, 100, 1000)).toEqual([[0, 3]]);
  expect(curveOf([[2000, 3]], range, 100, 1000)).toEqual([]);
  for (const { memory } of day.devices) {
    const shown = { start: NOW - DAY / 2, end: NOW };
    const curve = curveOf(memory, shown, 300, NOW);
    expect(curve[curve.length - 1][1]).toBe(memory[memory.length - 1][1]);
    expect(Math.max(...curve.map(([, value]) => value))).toBe(
      greatest(memory, shown.start, shown.end)
    );
    expect(curve.length).toBeLessThanOrEqual(700);
  }
});

test('events that are close together are one mark, of the kind that matters most', () => {
  const events = [anEvent(0), anEvent(5, 'failed'), anEvent(9, 'checkpoint'), anEvent(30)];
  const marks = marksOf([...events, anEvent(31, 'lost', 'cuda:1')], 'cuda:0', 10);
  expect(marks.map(({ at, kind, events: all }) => [at, kind, all.length])).toEqual([
    [0, 'failed', 3],
    [30, 'resumed', 1]
  ]);
});

test('a tick too close to the one before is left out', () => {
  const all = [0, 4, 9, 10, 25].map(at => ({ at }));
  expect(spaced(all, 10).map(({ at }) => at)).toEqual([0, 10, 25]);
});

test('lanes have one height up to six rows, and fill the given height', () => {
  expect(laneOf(6).height).toBe(laneOf(1).height);
  expect(laneOf(40).height).toBeGreaterThan(laneOf(1).height);
  expect(Math.abs(laneOf(1, 200).height - 200)).toBeLessThanOrEqual(2);
  expect(laneOf(1, 10_000).height).toBeLessThan(400);
});

test('spans and events are stepped through in order of time', () => {
  const items = itemsOf([aSpan('a', 0, 9), aSpan('a', 20, 30)], [anEvent(10)], 'cuda:0');
  expect(items.map(({ type, start }) => [type, start])).toEqual([
    ['span', 0],
    ['event', 10],
    ['span', 20]
  ]);
});

test('a session keeps its style, and the first styles differ', () => {
  const styles = new SessionStyles(7);
  const first = Array.from({ length: 21 }, (_, index) => styles.of(`s${index}`));
  expect(new Set(first.map(each => JSON.stringify(each))).size).toBe(21);
  expect(styles.of('s3')).toBe(first[3]);
});

test('the shown time stays within the last day', () => {
  const random = randomOf(3);
  let shown: IWindow = { seconds: 3600, end: null };
  for (let step = 0; step < 2000; step++) {
    const choice = random();
    if (choice < 0.4) {
      shown = panned(shown, 3 * random() - 1.5, NOW);
    } else if (choice < 0.8) {
      shown = zoomed(shown, Math.exp(3 * random() - 1.5), NOW, random());
    } else {
      shown = showing(shown, NOW - DAY * random(), NOW);
    }
    const { start, end } = rangeOf(shown, NOW);
    expect(shown.seconds).toBeGreaterThanOrEqual(10 - 1e-6);
    expect(shown.seconds).toBeLessThanOrEqual(DAY + 1e-6);
    expect(end).toBeLessThanOrEqual(NOW + 0.015 * shown.seconds + 1e-3);
    expect(start).toBeGreaterThanOrEqual(NOW - DAY - 1e-3);
  }
});

test('zooming keeps the moment under the pointer in place', () => {
  const before = { seconds: 3600, end: NOW - 20_000 };
  const moment = toMoment(0.3, rangeOf(before, NOW), 1);
  const after = zoomed(before, 0.5, NOW, 0.3);
  expect(toMoment(0.3, rangeOf(after, NOW), 1)).toBeCloseTo(moment, 3);
});

test('the live view stays live when zoomed, and becomes live again when moved to the present', () => {
  expect(zoomed({ seconds: 3600, end: null }, 0.5, NOW)).toEqual({ seconds: 1800, end: null });
  expect(panned({ seconds: 3600, end: null }, -0.5, NOW).end).not.toBeNull();
  expect(panned({ seconds: 3600, end: NOW - 1800 }, 5, NOW).end).toBeNull();
});

test('a moment in view does not move the window, and one out of view comes into view', () => {
  const shown = { seconds: 100, end: NOW - 1000 };
  expect(showing(shown, NOW - 1050, NOW)).toBe(shown);
  const { start, end } = rangeOf(showing(shown, NOW - 5000, NOW), NOW);
  expect(start).toBeLessThan(NOW - 5000);
  expect(end).toBeGreaterThan(NOW - 5000);
});

test.each([
  [300, 800, 30],
  [3600, 800, 300],
  [DAY, 800, 7200],
  [DAY, 200, 12 * 3600]
])('a range of %i s on %i pixels has a tick every %i s', (seconds, width, expected) => {
  expect(tickSeconds({ start: 0, end: seconds }, width, 60)).toBe(expected);
});

test('ticks are at whole hours of local time, and a new day is marked', () => {
  const range = { start: NOW - DAY, end: NOW };
  const offset = 5.5 * 3600;
  const found = ticks(range, 3600, () => offset);
  expect(found).toHaveLength(24);
  expect(found.every(({ at }) => (at + offset) % 3600 === 0)).toBe(true);
  expect(found.filter(({ isDay }) => isDay)).toHaveLength(1);
});

test('ticks follow clocks that are changed', () => {
  const change = NOW - 40_000;
  const found = ticks({ start: NOW - DAY, end: NOW }, 7200, at => (at < change ? 7200 : 3600));
  found.forEach(({ at }) => expect((at + (at < change ? 7200 : 3600)) % 7200).toBe(0));
  expect(new Set(found.map(({ at }) => at)).size).toBe(found.length);
});
