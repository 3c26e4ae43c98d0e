import type { TranslationBundle } from '@jupyterlab/translation';
import { bytesText } from '../../text/format';
import { type IScene, MARK_PITCH } from './chart';
import { valueAt } from '../data/data';
import { type IMark, type Item, LANE, spansAt } from '../data/layout';
import { type IRange, toMoment, toPixel } from '../data/range';
import type { Pointed } from './tooltip';

/** The item that is pointed at, or selected by keys, and where to show its tip. */
export interface IHit {
  pointed: Pointed;
  x: number;
  y: number;
}

/**
 * A selected span or event of a device; several events that are drawn as one are selected in turn.
 */
export interface ISelection {
  device: string;
  item: Item;
}

/** Return the id of the session of an item. */
export function sessionOf(item: Item): string {
  return item.type === 'span' ? item.span.session : item.event.session;
}

/** True if two items are the same one, perhaps with newer data. */
export function isSame(one: Item, other: Item): boolean {
  return (
    one.type === other.type && one.start === other.start && sessionOf(one) === sessionOf(other)
  );
}

/** Return the item to select when something is pointed at. */
export function itemOf(pointed: Pointed): Item | null {
  switch (pointed.type) {
    case 'spans':
      return { type: 'span', span: pointed.spans[0], start: pointed.spans[0].start };
    case 'events':
      return { type: 'event', event: pointed.events[0], start: pointed.events[0].at };
    case 'value':
      return null;
  }
}

/** Return where each lane begins. */
export function topsOf(heights: readonly number[]): number[] {
  let top = 0;
  return heights.map(height => (top += height) - height);
}

/** Return the edges of a session's bar at about a moment, relative to the first lane's top. */
export function barEdges(
  layout: readonly Pick<IScene, 'device' | 'rows' | 'lane'>[],
  tops: readonly number[],
  device: string,
  session: string,
  at: number
): { top: number; bottom: number } | null {
  const index = layout.findIndex(each => each.device.id === device);
  if (index < 0) {
    return null;
  }
  const { device: activity, rows, lane } = layout[index];
  let nearest = -1;
  let distance = Infinity;
  activity.held.forEach((span, each) => {
    const apart = Math.min(Math.abs(span.start - at), Math.abs(span.end - at));
    if (span.session === session && apart < distance) {
      [nearest, distance] = [each, apart];
    }
  });
  const row = nearest < 0 ? 0 : rows.of[nearest];
  const top = tops[index] + lane.bars + row * lane.barPitch;
  return { top, bottom: top + lane.barHeight };
}

/** Return what is drawn at a point of a lane. */
export function pointedAt(
  scene: IScene,
  x: number,
  y: number,
  trans: TranslationBundle
): Pointed | null {
  const { device, rows, lane, range, width, until, now } = scene;
  const at = toMoment(x, range, width);
  if (y < lane.bars) {
    const mark = nearestMark(scene.marks, range, width, x);
    return mark && { type: 'events', events: mark.events };
  }
  if (y < lane.memory) {
    const row = Math.floor((y - lane.bars) / lane.barPitch);
    const exactly = { start: at, end: at };
    const near = { start: toMoment(x - 2, range, width), end: toMoment(x + 2, range, width) };
    let found = spansAt(device.held, rows, row, exactly, until, now);
    if (found.length !== 1 || toPixel(device.held[found[0]].end, near, 4) < 8) {
      found = spansAt(device.held, rows, row, near, until, now);
    }
    return found.length > 0 ? { type: 'spans', spans: found.map(each => device.held[each]) } : null;
  }
  if (at > now) {
    return null;
  }
  if (y < lane.queue) {
    const bytes = valueAt(device.memory, at);
    const text =
      bytes !== null &&
      trans.__('%1 of %2 in use', bytesText(bytes), bytesText(device.memory_total));
    return text ? { type: 'value', text, at } : null;
  }
  const count = valueAt(device.queue, at);
  return count === null
    ? null
    : { type: 'value', text: trans._n('%1 waiting', '%1 waiting', count), at };
}

function nearestMark(
  marks: readonly IMark[],
  range: IRange,
  width: number,
  x: number
): IMark | null {
  let nearest: IMark | null = null;
  let distance = MARK_PITCH / 2;
  for (const mark of marks) {
    const apart = Math.abs(toPixel(mark.at, range, width) - x);
    if (apart < distance) {
      [nearest, distance] = [mark, apart];
    }
  }
  return nearest;
}

/** Return where to show the tip of the selected item, if it is in view. */
export function hitAt(
  { device, item }: ISelection,
  scenes: readonly IScene[],
  range: IRange,
  width: number,
  root: HTMLElement | null
): IHit | null {
  const plot = root?.querySelector<HTMLElement>(`[data-device="${CSS.escape(device)}"]`);
  const scene = scenes.find(each => each.device.id === device);
  const isInView = item.start <= range.end && item.start >= range.start - 1;
  if (!root || !plot || !scene || !isInView || document.activeElement !== plot) {
    return null;
  }
  const [box, around] = [plot.getBoundingClientRect(), root.getBoundingClientRect()];
  const x = box.left - around.left + toPixel(item.start, range, width);
  const y = box.top - around.top + scene.lane.marks;
  return item.type === 'span'
    ? { pointed: { type: 'spans', spans: [item.span] }, x, y: y + LANE.marks }
    : { pointed: { type: 'events', events: [item.event] }, x, y };
}
