import { endOf, type ActivityEvent, type Kind, lastIndex, type Span, type Steps } from './data';
import { type IRange, toPixel } from './range';

/** The row of its device in which each span is drawn: spans in one row do not overlap. */
export interface IRows {
  /** For each span its row. */
  of: readonly number[];
  count: number;
}

/**
 * Return the row of each span: the session's previous row if it is free, otherwise the first free
 * one.
 */
export function rowsOf(held: readonly Span[], until: number): IRows {
  const busyUntil: number[] = [];
  const lastOf = new Map<string, number>();
  const of = held.map(span => {
    const isFree = (row: number) => busyUntil[row] <= span.start + 1e-3;
    const last = lastOf.get(span.session);
    let row =
      last !== undefined && isFree(last) ? last : busyUntil.findIndex((_, at) => isFree(at));
    row = row < 0 ? busyUntil.length : row;
    busyUntil[row] = endOf(span, until, Infinity);
    lastOf.set(span.session, row);
    return row;
  });
  return { of, count: Math.max(1, busyUntil.length) };
}

/** A span as drawn, in pixels. */
export interface IBar {
  span: Span;
  /** Its index among the spans of the device. */
  index: number;
  row: number;
  left: number;
  right: number;
}

/** Narrower spans are drawn with this width, in pixels. */
const WIDTH_MIN = 1.5;

/**
 * Return the bars to draw: of spans too short to be distinguished, only as many as there are
 * pixels.
 *
 * @returns In each row from left to right, without overlaps of more than two or three pixels.
 */
export function barsAt(
  held: readonly Span[],
  rows: IRows,
  range: IRange,
  width: number,
  until: number,
  now: number
): IBar[] {
  const bars: IBar[] = [];
  const last: (IBar | undefined)[] = [];
  held.forEach((span, index) => {
    const end = endOf(span, until, now);
    if (end < range.start || span.start > range.end) {
      return;
    }
    const left = Math.max(toPixel(span.start, range, width), -2);
    const right = Math.min(toPixel(end, range, width), width + 2);
    const row = rows.of[index];
    const before = last[row];
    const isNarrow = right - left < WIDTH_MIN;
    if (isNarrow && before && before.right >= left + WIDTH_MIN / 2) {
      return; // its place is taken
    }
    const from = before && isNarrow ? Math.max(left, before.right) : left;
    const bar = { span, index, row, left: from, right: Math.max(right, from + WIDTH_MIN) };
    last[row] = bar;
    bars.push(bar);
  });
  return bars;
}

/**
 * Return the steps of a curve to draw: pixels, and the value from there on.
 *
 * @returns Of the steps within a pixel the highest, so that no peak is lost, and then the last one.
 */
export function curveOf(
  steps: Steps,
  range: IRange,
  width: number,
  now: number
): [number, number][] {
  const right = Math.min(width, toPixel(now, range, width));
  const points: [number, number][] = [];
  let index = Math.max(
    lastIndex(steps, range.start, step => step[0]),
    0
  );
  while (index < steps.length) {
    const x = Math.max(toPixel(steps[index][0], range, width), 0);
    if (x > right) {
      break;
    }
    let most = steps[index][1];
    let last = most;
    while (++index < steps.length && toPixel(steps[index][0], range, width) < x + 1) {
      last = steps[index][1];
      most = Math.max(most, last);
    }
    points.push([x, most]);
    if (last !== most) {
      points.push([Math.min(x + 1, right), last]);
    }
  }
  return points;
}

/**
 * Return the spans that are drawn at a point: several if they are too short to be distinguished.
 */
export function spansAt(
  held: readonly Span[],
  rows: IRows,
  row: number,
  range: IRange,
  until: number,
  now: number
): number[] {
  const found: number[] = [];
  held.forEach((span, index) => {
    if (
      rows.of[index] === row &&
      span.start <= range.end &&
      endOf(span, until, now) >= range.start
    ) {
      found.push(index);
    }
  });
  return found;
}

/** Events at about the same time, drawn as one mark. */
export interface IMark {
  at: number;
  /** The most important kind. */
  kind: Kind;
  events: ActivityEvent[];
}

/** Kinds of events, the most important first. */
export const KINDS: readonly Kind[] = [
  'lost',
  'failed',
  'restored',
  'migrated',
  'checkpoint',
  'swapped_out',
  'suspended',
  'resumed'
];

/**
 * Return the marks of a device: events that are closer together than `seconds` are one.
 *
 * They depend on the length of the shown time and not on its position: marks stay while panning.
 */
export function marksOf(
  events: readonly ActivityEvent[],
  device: string,
  seconds: number
): IMark[] {
  const marks: IMark[] = [];
  for (const event of events) {
    const last = marks[marks.length - 1];
    if (event.device !== device) {
      continue;
    }
    if (last && event.at - last.at < seconds) {
      last.events.push(event);
      if (KINDS.indexOf(event.kind) < KINDS.indexOf(last.kind)) {
        last.kind = event.kind;
      }
    } else {
      marks.push({ at: event.at, kind: event.kind, events: [event] });
    }
  }
  return marks;
}

/** Return a selection of events, in their order, with at least `seconds` between them. */
export function spaced<T extends { at: number }>(all: readonly T[], seconds: number): T[] {
  let last = -Infinity;
  return all.filter(({ at }) => {
    const isKept = at - last >= seconds;
    last = isKept ? at : last;
    return isKept;
  });
}

/** Heights of a lane's parts, in pixels: minimum heights for the parts that can grow. */
export const LANE = { marks: 22, bars: 56, memory: 38, queue: 18, gap: 5, padding: 7 };

const ROW_GAP = 2;
const ROW_MIN = 7;
/** Maximum growth of a lane above its minimum height; curves and bars share it. */
const STRETCH_MAX = 160;

/** Position and height of the parts of a lane. */
export interface ILane {
  marks: number;
  bars: number;
  barHeight: number;
  barPitch: number;
  memory: number;
  memoryHeight: number;
  queue: number;
  queueHeight: number;
  height: number;
}

/**
 * Return the parts of a lane: as high with one row as with several.
 *
 * @param room - Available height of the lane, in pixels; if that is too little, it is higher.
 */
export function laneOf(rowCount: number, room = 0): ILane {
  const bars = LANE.padding + LANE.marks;
  const rest = 2 * LANE.gap + LANE.memory + LANE.queue + LANE.padding;
  const spare = Math.floor(Math.min(Math.max(room - bars - LANE.bars - rest, 0), STRETCH_MAX));
  const pitch = Math.max((LANE.bars + ROW_GAP + spare * 0.4) / rowCount, ROW_MIN + ROW_GAP);
  const memory = Math.round(bars + pitch * rowCount - ROW_GAP + LANE.gap);
  const memoryHeight = Math.round(LANE.memory + spare * 0.45);
  const queue = memory + memoryHeight + LANE.gap;
  const queueHeight = Math.round(LANE.queue + spare * 0.1);
  return {
    marks: LANE.padding,
    bars,
    barHeight: pitch - ROW_GAP,
    barPitch: pitch,
    memory,
    memoryHeight,
    queue,
    queueHeight,
    height: queue + queueHeight + LANE.padding
  };
}

/** An item of a lane that can be pointed at: a span, or an event. */
export type Item =
  | { type: 'span'; span: Span; start: number }
  | { type: 'event'; event: ActivityEvent; start: number };

/** Return spans and events of a device in the order of time, to step through. */
export function itemsOf(
  held: readonly Span[],
  events: readonly ActivityEvent[],
  device: string
): Item[] {
  const items: Item[] = [
    ...held.map(span => ({ type: 'span' as const, span, start: span.start })),
    ...events
      .filter(event => event.device === device)
      .map(event => ({ type: 'event' as const, event, start: event.at }))
  ];
  return items.sort((one, other) => one.start - other.start);
}

/**
 * Appearance that distinguishes a session from others: a colour and, when there are more sessions
 * than colours, a texture.
 */
export interface ISessionStyle {
  colour: number;
  texture: number;
}

/** Assigns each session a style of its own and remembers it. */
export class SessionStyles {
  constructor(private readonly _colours: number) {}

  of(session: string): ISessionStyle {
    let style = this._styles.get(session);
    if (style === undefined) {
      const count = this._styles.size;
      style = { colour: count % this._colours, texture: Math.floor(count / this._colours) % 3 };
      this._styles.set(session, style);
    }
    return style;
  }

  private readonly _styles = new Map<string, ISessionStyle>();
}
