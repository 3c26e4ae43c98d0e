import { DAY } from './data';

/** A time range that is shown, in seconds since the epoch. */
export interface IRange {
  start: number;
  end: number;
}

/** The shown window: a number of seconds until a moment, or until now while `end` is null. */
export interface IWindow {
  seconds: number;
  end: number | null;
}

export const SECONDS_MIN = 10;

/** Margin to the right of now: a part of the shown time. */
const MARGIN = 0.015;

/** Return the time range that a window shows. */
export function rangeOf({ seconds, end }: IWindow, now: number): IRange {
  const last = end ?? now + seconds * MARGIN;
  return { start: last - seconds, end: last };
}

/** Return the window, limited to the last day. */
function bounded(seconds: number, end: number, now: number): IWindow {
  const within = Math.min(Math.max(seconds, SECONDS_MIN), DAY);
  const latest = now + within * MARGIN;
  return { seconds: within, end: Math.min(Math.max(end, now - DAY + within), latest) };
}

/** Pan: show a time that is earlier (negative) or later by a part of the shown time. */
export function panned(window: IWindow, parts: number, now: number): IWindow {
  const { end } = rangeOf(window, now);
  const result = bounded(window.seconds, end + parts * window.seconds, now);
  const isAtNow = (result.end as number) >= now + result.seconds * MARGIN;
  return isAtNow ? { ...result, end: null } : result;
}

/**
 * Zoom: show more or less time.
 *
 * @param factor - How many times as much time to show.
 * @param anchor - Point that stays in place: 0 is the left edge, 1 the right one. A window that
 *   follows the present continues to follow it.
 */
export function zoomed(window: IWindow, factor: number, now: number, anchor = 1): IWindow {
  const seconds = Math.min(Math.max(window.seconds * factor, SECONDS_MIN), DAY);
  if (window.end === null && anchor > 0.9) {
    return { seconds, end: null };
  }
  const { start } = rangeOf(window, now);
  const fixed = start + anchor * window.seconds;
  return panned({ seconds, end: fixed + (1 - anchor) * seconds }, 0, now);
}

/** Return a window in which a moment is visible, moved as little as possible. */
export function showing(window: IWindow, moment: number, now: number): IWindow {
  const { start, end } = rangeOf(window, now);
  const margin = window.seconds / 10;
  if (moment >= start && moment <= end) {
    return window;
  }
  const shift = moment < start ? moment - margin - start : moment + margin - end;
  return panned(window, shift / window.seconds, now);
}

/** Return the position of a moment, in pixels from the left. */
export function toPixel(moment: number, { start, end }: IRange, width: number): number {
  return ((moment - start) / (end - start)) * width;
}

/** Return the moment that is drawn at a pixel. */
export function toMoment(pixel: number, { start, end }: IRange, width: number): number {
  return start + (pixel / width) * (end - start);
}

/** A line of the axis. */
export interface ITick {
  at: number;
  /** True if a day begins here. */
  isDay: boolean;
}

const MINUTE = 60;
const HOUR = 3600;
const TICK_SECONDS = [
  ...[1, 2, 5, 10, 15, 30],
  ...[1, 2, 5, 10, 15, 30].map(count => count * MINUTE),
  ...[1, 2, 3, 6, 12, 24].map(count => count * HOUR)
];

/** Return how many seconds there are between two ticks. */
export function tickSeconds(range: IRange, width: number, pixelsMin: number): number {
  const least = ((range.end - range.start) / Math.max(width, 1)) * pixelsMin;
  return TICK_SECONDS.find(seconds => seconds >= least) ?? DAY;
}

/**
 * Return the ticks of an axis.
 *
 * @param offset - Seconds by which local time is ahead of UTC at a moment.
 */
export function ticks(range: IRange, seconds: number, offset: (at: number) => number): ITick[] {
  const found: ITick[] = [];
  const shift = offset(range.start);
  const first = Math.ceil((range.start + shift) / seconds) * seconds - shift;
  for (let at = first; at <= range.end; at += seconds) {
    // Where the clocks change, the later hours are aligned by their own offset.
    const local = at + offset(at);
    const aligned = at - (((local % seconds) + seconds) % seconds);
    if (aligned >= range.start && aligned !== found[found.length - 1]?.at) {
      found.push({ at: aligned, isDay: (aligned + offset(aligned)) % DAY === 0 });
    }
  }
  return found;
}

/** Seconds by which this browser's time is ahead of UTC at a moment. */
export function localOffset(at: number): number {
  return -60 * new Date(at * 1000).getTimezoneOffset();
}
