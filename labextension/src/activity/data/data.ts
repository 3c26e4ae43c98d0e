import type { components } from '../../openapi';

/** The record of devices, as `openapi.yaml` describes it; moments are seconds of the epoch. */
export type Activity = components['schemas']['Activity'];
/** What one device did. */
export type DeviceActivity = Activity['devices'][number];
/** A time for which a session had a device. */
export type Span = DeviceActivity['held'][number];
/** Something that happened to a session. */
export type Happening = Activity['events'][number];
/** Moments, and the values from then on. */
export type Steps = readonly (readonly number[])[];

export type Kind = Happening['kind'];

/** How much of the past is kept and shown: seconds. */
export const DAY = 86_400;

/** What is closer together than this is at the same time: clocks are read twice. */
const EPSILON = 0.05;

/**
 * Add what was told later to a record: from `told.since` on it replaces what was known.
 *
 * @param before - What was known; null if nothing.
 * @param told - An answer of the server, from a moment that `before` covers.
 * @returns The whole, without what is older than a day.
 */
export function merge(before: Activity | null, told: Activity): Activity {
  if (before === null || told.since <= before.since || told.since > before.until) {
    return told;
  }
  const since = told.since;
  const horizon = Math.max(before.since, told.until - DAY);
  const mergedDevices = told.devices.map(device => {
    const known = before.devices.find(each => each.id === device.id);
    return known ? mergedDevice(known, device, horizon, since) : device;
  });
  const isTold = new Set(told.devices.map(device => device.id));
  const others = before.devices
    .filter(device => !isTold.has(device.id))
    .map(device => ({
      ...device,
      held: clipped(device.held, horizon, since),
      memory: stepsWithin(device.memory, horizon, since),
      queue: stepsWithin(device.queue, horizon, since)
    }))
    .filter(device => device.held.length > 0);
  const events = before.events.filter(({ at }) => at >= horizon && at < since);
  return {
    ...told,
    since: horizon,
    devices: [...mergedDevices, ...others],
    events: [...events, ...told.events.filter(({ at }) => at >= since)]
  };
}

function mergedDevice(
  before: DeviceActivity,
  told: DeviceActivity,
  horizon: number,
  since: number
): DeviceActivity {
  return {
    ...told,
    held: joined(clipped(before.held, horizon, since), told.held, since),
    memory: joinedSteps(stepsWithin(before.memory, horizon, since), told.memory, since),
    queue: joinedSteps(stepsWithin(before.queue, horizon, since), told.queue, since)
  };
}

/** Return the parts of spans that are within a time. */
export function clipped(held: readonly Span[], from: number, to: number): Span[] {
  return held
    .filter(span => span.start < to && span.end > from)
    .map(span =>
      span.start >= from && span.end <= to
        ? span
        : { ...span, start: Math.max(span.start, from), end: Math.min(span.end, to) }
    );
}

/** Join spans before a moment with those after it; what was cut there becomes one again. */
function joined(before: readonly Span[], told: readonly Span[], since: number): Span[] {
  const cut = new Map<string, number>();
  const result = [...before];
  result.forEach((span, index) => {
    if (span.end >= since - EPSILON) {
      cut.set(`${span.state} ${span.session}`, index);
    }
  });
  for (const span of told) {
    const key = `${span.state} ${span.session}`;
    const index = span.start <= since + EPSILON ? cut.get(key) : undefined;
    if (index !== undefined) {
      result[index] = { ...span, start: result[index].start };
      cut.delete(key);
    } else if (span.end > since) {
      result.push(span.start < since ? { ...span, start: since } : span);
    }
  }
  return result.sort((one, other) => one.start - other.start);
}

function stepsWithin(steps: Steps, from: number, to: number): number[][] {
  const start = valueAt(steps, from);
  const within = steps.filter(([at]) => at > from && at < to).map(step => [...step]);
  return start === null ? within : [[from, start], ...within];
}

function joinedSteps(before: number[][], told: Steps, since: number): number[][] {
  const result = before;
  for (const [at, value] of told) {
    const moment = Math.max(at, since);
    if (result.length > 0 && result[result.length - 1][0] >= moment) {
      result.pop();
    }
    if (result.length === 0 || result[result.length - 1][1] !== value) {
      result.push([moment, value]);
    }
  }
  return result;
}

/** Return the index of the last element that is not after a moment; -1 if all are. */
export function lastIndex<T>(
  sorted: readonly T[],
  moment: number,
  at: (each: T) => number
): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(sorted[middle]) <= moment) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

/** Return the value that holds at a moment; null before the first. */
export function valueAt(steps: Steps, moment: number): number | null {
  const index = lastIndex(steps, moment, step => step[0]);
  return index < 0 ? null : steps[index][1];
}

/** Return the greatest value within a time; 0 if nothing is known of it. */
export function greatest(steps: Steps, from: number, to: number): number {
  return steps.reduce(
    (most, [at, value]) => (at > from && at <= to ? Math.max(most, value) : most),
    valueAt(steps, from) ?? 0
  );
}

/** Whether a span lasts until the end of a record, and so may last still. */
function isOpen(span: Span, until: number): boolean {
  return span.end >= until - EPSILON;
}

/**
 * The end of a span: those that last until the end of the record go on until now.
 *
 * What changes is told at once, so whatever was not told goes on.
 */
export function endOf(span: Span, until: number, now: number): number {
  return isOpen(span, until) ? Math.max(span.end, now) : span.end;
}

/** Return who has a device at a moment, the ones that run first. */
export function holdersAt(held: readonly Span[], moment: number, until: number): Span[] {
  const order = ['running', 'migrating', 'restoring', 'idle'];
  return held
    .filter(span => span.start <= moment && (span.end > moment || isOpen(span, until)))
    .sort((one, other) => order.indexOf(one.state) - order.indexOf(other.state));
}

/** Return for how many seconds within a time anybody has run. */
export function busySeconds(
  held: readonly Span[],
  from: number,
  to: number,
  until: number,
  now: number
): number {
  let covered = from;
  let sum = 0;
  for (const span of held) {
    if (span.state === 'running') {
      const start = Math.max(span.start, covered);
      const end = Math.min(endOf(span, until, now), to);
      if (end > start) {
        // Of what the resolution has made one, only a part.
        const part = (span.seconds ?? span.end - span.start) / (span.end - span.start);
        sum += (end - start) * Math.min(1, part);
        covered = end;
      }
    }
  }
  return sum;
}

/** How long a session has had devices. */
export interface IUse {
  session: string;
  name: string;
  owner: string;
  /** Seconds in which it ran. */
  running: number;
  /** Seconds in which it held a device in any state. */
  held: number;
}

/**
 * Return how long each session has had devices within a time.
 *
 * @returns All sessions of the record, those that ran longest in all of it first: who is who stays
 *   where it is, whatever one looks at.
 */
export function uses(record: Activity, from: number, to: number, now: number): IUse[] {
  const found = new Map<string, IUse & { inAll: number }>();
  for (const { held } of record.devices) {
    for (const span of held) {
      const { session, name, owner } = span;
      const use = found.get(session) ?? { session, name, owner, running: 0, held: 0, inAll: 0 };
      const end = endOf(span, record.until, now);
      const seconds = Math.max(Math.min(end, to) - Math.max(span.start, from), 0);
      const isRunning = span.state === 'running';
      use.held += seconds;
      use.running += isRunning ? seconds : 0;
      use.inAll += isRunning ? span.end - span.start : 0;
      found.set(session, use);
    }
  }
  return [...found.values()].sort((one, other) => other.inAll - one.inAll);
}

/** A way from device to device. */
export interface IMove {
  at: number;
  session: string;
  source: string;
  target: string;
}

/** What was longer ago is not where a session was moved from: seconds. */
const MOVE_SECONDS_MAX = 120;

/** Return whence sessions were moved: where they were last when they came to another device. */
export function moves(record: Activity): IMove[] {
  return record.events
    .filter(event => event.kind === 'migrated')
    .flatMap(({ at, session, device: target }) => {
      let source: string | undefined;
      let latest = at - MOVE_SECONDS_MAX;
      for (const { id, held } of record.devices) {
        for (const span of id === target ? [] : held) {
          if (span.session === session && span.start < at && span.end >= latest) {
            [source, latest] = [id, span.end];
          }
        }
      }
      return source === undefined ? [] : [{ at, session, source, target }];
    });
}
