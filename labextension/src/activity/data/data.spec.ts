import { expect, test } from 'vitest';
import { aDay, randomOf } from '../../testing/activity';
import {
  type Activity,
  busySeconds,
  clipped,
  DAY,
  endOf,
  greatest,
  holdersAt,
  merge,
  moves,
  type Span,
  uses,
  valueAt
} from './data';

const NOW = 1_800_000_000;

function aSpan(start: number, end: number, overrides: Partial<Span> = {}): Span {
  const session = overrides.session ?? 's';
  return {
    device: 'cuda:0',
    name: '',
    owner: 'ada',
    state: 'running',
    ...overrides,
    session,
    start,
    end
  } as Span;
}

function aRecord(
  since: number,
  until: number,
  held: Span[],
  overrides: Partial<Activity> = {}
): Activity {
  const device = { id: 'cuda:0', kind: 'cuda' as const, memory_total: 100, memory: [], queue: [] };
  return { since, until, devices: [{ ...device, held }], events: [], ...overrides } as Activity;
}

/** Return the answer of a server that knows a whole day, to a request for a part of it. */
function answer(day: Activity, since: number, until: number): Activity {
  const steps = (all: number[][]): number[][] => [
    [since, valueAt(all, since) ?? 0],
    ...all.filter(([at]) => at > since && at <= until)
  ];
  return {
    ...day,
    since,
    until,
    devices: day.devices.map(device => ({
      ...device,
      held: clipped(device.held, since, until),
      memory: steps(device.memory),
      queue: steps(device.queue)
    })),
    events: day.events.filter(({ at }) => at >= since && at < until)
  };
}

test.each([1, 2, 3, 4])('many small answers are as good as one (seed %i)', seed => {
  const day = aDay({ until: NOW, devices: 3, spanCount: 300, seed });
  const random = randomOf(seed);
  let until = NOW - DAY + 3600;
  let known: Activity | null = null;
  while (until < NOW) {
    const since: number = known === null ? day.since : known.until - 2;
    known = merge(known, answer(day, since, until));
    until += 600 + 7200 * random();
  }
  known = merge(known, answer(day, known!.until - 2, NOW));
  const whole = answer(day, day.since, NOW);
  expect(known.since).toBe(day.since);
  known.devices.forEach((device, index) => {
    const before = whole.devices[index];
    expect(device.held.map(({ start, end, session }) => [start, end, session])).toEqual(
      before.held.map(({ start, end, session }) => [start, end, session])
    );
    for (let at = day.since; at < NOW; at += 600) {
      expect(valueAt(device.memory, at)).toBe(valueAt(before.memory, at));
      expect(valueAt(device.queue, at)).toBe(valueAt(before.queue, at));
    }
  });
  expect(known.events).toEqual(whole.events);
});

test('data older than a day is dropped', () => {
  const events = [{ ...aSpan(0, 0), at: 10, kind: 'resumed', device: 'cuda:0', text: '' } as never];
  const before = aRecord(0, DAY, [aSpan(5, 10), aSpan(50, 500)], { events });
  const later = aRecord(DAY - 2, DAY + 100, []);
  const { since, devices, events: kept } = merge(before, later);
  expect(since).toBe(100);
  expect(devices[0].held).toEqual([aSpan(100, 500)]);
  expect(kept).toEqual([]);
});

test.each<[string, Span[], Span[], [number, number][]]>([
  ['goes on', [aSpan(0, 100)], [aSpan(98, 120)], [[0, 120]]],
  ['has ended while asked', [aSpan(0, 100)], [aSpan(98, 99)], [[0, 99]]],
  ['was known from its beginning', [aSpan(0, 100)], [aSpan(0, 120)], [[0, 120]]],
  [
    'begins anew',
    [aSpan(0, 50)],
    [aSpan(105, 110)],
    [
      [0, 50],
      [105, 110]
    ]
  ],
  [
    'does something else',
    [aSpan(0, 100)],
    [aSpan(98, 120, { state: 'idle' })],
    [
      [0, 98],
      [98, 120]
    ]
  ],
  ['was not there after all', [aSpan(0, 50), aSpan(99, 100)], [], [[0, 50]]]
])('a span that %s', (_, held, later, expected) => {
  const merged = merge(aRecord(0, 100, held), aRecord(98, 120, later));
  expect(merged.devices[0].held.map(({ start, end }) => [start, end])).toEqual(expected);
});

test('a response that does not adjoin the record replaces it', () => {
  const later = aRecord(500, 600, [aSpan(500, 510)]);
  expect(merge(aRecord(0, 100, [aSpan(0, 100)]), later)).toBe(later);
});

test('a removed device is kept while it has spans', () => {
  const before = aRecord(0, 100, [aSpan(0, 90)]);
  const later = { ...aRecord(98, 120, []), devices: [] };
  expect(merge(before, later).devices.map(({ id }) => id)).toEqual(['cuda:0']);
  expect(
    merge({ ...before, devices: [{ ...before.devices[0], held: [] }] }, later).devices
  ).toEqual([]);
});

test.each([
  [-1, null],
  [0, 5],
  [9, 5],
  [10, 7],
  [100, 7]
])('the value at %i is %s', (at, value) => {
  expect(
    valueAt(
      [
        [0, 5],
        [10, 7]
      ],
      at
    )
  ).toBe(value);
});

test('the greatest value includes the value at the beginning', () => {
  const steps = [
    [0, 9],
    [10, 2],
    [20, 4]
  ];
  expect(greatest(steps, 5, 12)).toBe(9);
  expect(greatest(steps, 10, 30)).toBe(4);
  expect(greatest([], 0, 10)).toBe(0);
});

test('a span without an end lasts until now', () => {
  expect(endOf(aSpan(0, 100), 100, 130)).toBe(130);
  expect(endOf(aSpan(0, 90), 100, 130)).toBe(90);
  expect(holdersAt([aSpan(0, 100)], 130, 100)).toHaveLength(1);
  expect(holdersAt([aSpan(0, 90)], 90, 100)).toHaveLength(0);
});

test('running holders come before idle ones', () => {
  const held = [aSpan(0, 9, { session: 'a', state: 'idle' }), aSpan(1, 9, { session: 'b' })];
  expect(holdersAt(held, 5, 100).map(({ session }) => session)).toEqual(['b', 'a']);
});

test('overlapping running spans count once as use', () => {
  const held = [aSpan(0, 10), aSpan(5, 20, { session: 'b' }), aSpan(6, 8, { session: 'c' })];
  expect(busySeconds(held, 2, 30, 100, 100)).toBe(18);
  expect(busySeconds([aSpan(0, 10, { state: 'idle' })], 0, 10, 100, 100)).toBe(0);
  expect(busySeconds([aSpan(0, 10, { seconds: 2.5 })], 0, 10, 100, 100)).toBe(2.5);
});

test('sessions with the longest running time in the whole record come first', () => {
  const held = [
    aSpan(0, 50, { session: 'a', state: 'idle' }),
    aSpan(0, 3, { session: 'c' }),
    aSpan(0, 10, { session: 'b' }),
    aSpan(50, 55, { session: 'a' })
  ];
  const found = uses(aRecord(0, 100, held), 5, 100, 100);
  expect(found.map(({ session, running, held: all }) => [session, running, all])).toEqual([
    ['b', 5, 5],
    ['a', 5, 50],
    ['c', 0, 0]
  ]);
});

test('ranks of a program are together, where the whole program belongs', () => {
  const rank = (number: number, end: number, owner = 'ada') =>
    aSpan(0, end, { session: `${owner}${number}`, name: `train.py rank ${number}`, owner });
  const held = [
    aSpan(0, 8, { session: 'x', name: 'x.ipynb' }),
    rank(10, 6),
    rank(2, 4),
    rank(0, 9, 'bob')
  ];
  const found = uses(aRecord(0, 100, held), 0, 100, 100);
  expect(found.map(each => each.session)).toEqual(['ada2', 'ada10', 'bob0', 'x']);
});

test('a migration leads from the last device of the session to the new one', () => {
  const record = aRecord(0, 100, [aSpan(0, 50)]);
  const other = { ...record.devices[0], id: 'cuda:1', held: [aSpan(51, 100)] };
  const devices = [record.devices[0], other, { ...other, id: 'cuda:2', held: [aSpan(0, 9)] }];
  const event = { at: 51, kind: 'migrated', session: 's', device: 'cuda:1' } as never;
  expect(moves({ ...record, devices, events: [event] })).toEqual([
    { at: 51, session: 's', source: 'cuda:0', target: 'cuda:1' }
  ]);
});

test.each([
  ['of a session that was nowhere', 'x', 51],
  ['of one that had its device before', 's', 500],
  ['that came before it had any', 's', 0]
])('a migration %s is not drawn', (_, session, at) => {
  const event = { at, kind: 'migrated', session, device: 'cuda:1' } as never;
  expect(moves(aRecord(0, 600, [aSpan(0, 50)], { events: [event] }))).toEqual([]);
});
