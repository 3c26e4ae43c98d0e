import { RANKS } from '../../api/states';
import type { components } from '../../openapi';

/** The record of devices, as `openapi.yaml` describes it; times are in seconds since the epoch. */
export type Activity = components['schemas']['Activity'];
/** Activity of one device. */
export type DeviceActivity = Activity['devices'][number];
/** A time span in which a session held a device. */
export type Span = DeviceActivity['held'][number];
/** An event of a session. */
export type ActivityEvent = Activity['events'][number];
/** Times, and the values from then on. */
export type Steps = readonly (readonly number[])[];

export type Kind = ActivityEvent['kind'];

/** Time for which the past is kept and shown, in seconds. */
export const DAY = 86_400;

/** Times that differ by less count as equal: clocks are read twice. */
const EPSILON = 0.05;

/**
 * Merge a later answer into a record: from `later.since` on it replaces the known data.
 *
 * @param before - The record so far; null if there is none.
 * @param later - An answer of the server, from a time that `before` covers.
 * @returns The merged record, without anything older than a day.
 */
export function merge(before: Activity | null, later: Activity): Activity {
  if (before === null || later.since <= before.since || later.since > before.until) {
    return later;
  }
  const since = later.since;
  const horizon = Math.max(before.since, later.until - DAY);
  const mergedDevices = later.devices.map(device => {
    const known = before.devices.find(each => each.id === device.id);
    return known ? mergedDevice(known, device, horizon, since) : device;
  });
  const isKnown = new Set(later.devices.map(device => device.id));
  const others = before.devices
    .filter(device => !isKnown.has(device.id))
    .map(device => ({
      ...device,
      held: clipped(device.held, horizon, since),
      memory: stepsWithin(device.memory, horizon, since),
      queue: stepsWithin(device.queue, horizon, since)
    }))
    .filter(device => device.held.length > 0);
  const events = before.events.filter(({ at }) => at >= horizon && at < since);
  return {
    ...later,
    since: horizon,
    devices: [...mergedDevices, ...others],
    events: [...events, ...later.events.filter(({ at }) => at >= since)]
  };
}

function mergedDevice(
  before: DeviceActivity,
  later: DeviceActivity,
  horizon: number,
  since: number
): DeviceActivity {
  return {
    ...later,
    held: joined(clipped(before.held, horizon, since), later.held, since),
    memory: joinedSteps(stepsWithin(before.memory, horizon, since), later.memory, since),
    queue: joinedSteps(stepsWithin(before.queue, horizon, since), later.queue, since)
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

/** Join spans before a time with those after it; spans that were cut there become one again. */
function joined(before: readonly Span[], later: readonly Span[], since: number): Span[] {
  const cut = new Map<string, number>();
  const result = [...before];
  result.forEach((span, index) => {
    if (span.end >= since - EPSILON) {
      cut.set(`${span.state} ${span.session}`, index);
    }
  });
  for (const span of later) {
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

function joinedSteps(before: number[][], later: Steps, since: number): number[][] {
  const result = before;
  for (const [at, value] of later) {
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

/** Return the index of the last element that is not after a moment; -1 if all are later. */
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

/** Return the value at a moment; null before the first. */
export function valueAt(steps: Steps, moment: number): number | null {
  const index = lastIndex(steps, moment, step => step[0]);
  return index < 0 ? null : steps[index][1];
}

/** Return the greatest value within a time; 0 if there is no data for it. */
export function greatest(steps: Steps, from: number, to: number): number {
  return steps.reduce(
    (most, [at, value]) => (at > from && at <= to ? Math.max(most, value) : most),
    valueAt(steps, from) ?? 0
  );
}

/** True if a span lasts until the end of a record, and so may still last. */
function isOpen(span: Span, until: number): boolean {
  return span.end >= until - EPSILON;
}

/**
 * Return the end of a span: one that lasts until the end of the record continues until now.
 *
 * Changes are reported at once, so a span without a reported end continues.
 */
export function endOf(span: Span, until: number, now: number): number {
  return isOpen(span, until) ? Math.max(span.end, now) : span.end;
}

/** Return the holders of a device at a moment, running ones first. */
export function holdersAt(held: readonly Span[], moment: number, until: number): Span[] {
  return held
    .filter(span => span.start <= moment && (span.end > moment || isOpen(span, until)))
    .sort((one, other) => RANKS[other.state] - RANKS[one.state]);
}

/** Return for how many seconds within a time any session ran. */
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
        // Only a part of a span that the resolution has merged.
        const part = (span.seconds ?? span.end - span.start) / (span.end - span.start);
        sum += (end - start) * Math.min(1, part);
        covered = end;
      }
    }
  }
  return sum;
}

/** Time for which a session held devices. */
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
 * Return for how long each session held devices within a time.
 *
 * @returns All sessions of the record, those that ran longest in the whole record first: the order
 *   does not depend on the part that is shown. The ranks of a program are together, by rank.
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
  const together = new Map<string, number>();
  for (const use of found.values()) {
    together.set(programOf(use), (together.get(programOf(use)) ?? 0) + use.inAll);
  }
  const inAll = (use: IUse) => together.get(programOf(use)) ?? 0;
  return [...found.values()].sort(
    (one, other) =>
      inAll(other) - inAll(one) ||
      programOf(one).localeCompare(programOf(other)) ||
      one.name.localeCompare(other.name, undefined, { numeric: true })
  );
}

/** Identify a program whose ranks are sessions of their own; else the session. */
function programOf({ session, name, owner }: IUse): string {
  const program = / rank \d+$/.exec(name);
  return program ? JSON.stringify([owner, name.slice(0, program.index)]) : session;
}

/** A migration from one device to another. */
export interface IMove {
  at: number;
  session: string;
  source: string;
  target: string;
}

/** A span that ended earlier than this is not the source of a migration: seconds. */
const MOVE_SECONDS_MAX = 120;

/** Return migrations with their sources: the last device of a session before it came to another. */
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
