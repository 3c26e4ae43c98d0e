import {
  type DeviceActivity,
  greatest,
  type IMove,
  type ActivityEvent,
  type Span,
  type Steps
} from '../data/data';
import { drawIcon, kindIcons } from './icons';
import {
  barsAt,
  curveOf,
  type IBar,
  type ILane,
  type ISessionStyle,
  type IMark,
  type IRows,
  type Item,
  LANE,
  type SessionStyles
} from '../data/layout';
import { type IRange, type ITick, toPixel } from '../data/range';
import type { ITheme } from './theme';

/** A migration, and the heights between which it is drawn, relative to the first lane's top. */
export interface IMovePath extends IMove {
  from: number;
  to: number;
}

/** Contents of a lane. */
export interface IScene {
  device: DeviceActivity;
  rows: IRows;
  lane: ILane;
  marks: readonly IMark[];
  /** Position of the lane, relative to the first one's top. */
  top: number;
  /** Migrations to draw; those of other lanes cross this one. */
  moves: readonly IMovePath[];
  ticks: readonly ITick[];
  range: IRange;
  width: number;
  /** The end of the record. */
  until: number;
  now: number;
  /** The longest queue of any device, so that all are drawn at one scale. */
  queueMax: number;
  styles: SessionStyles;
  theme: ITheme;
  /** The highlighted session, or null. */
  highlighted: string | null;
  /** The selected item, or null. */
  selected: Item | null;
  label: (bar: IBar) => readonly string[];
}

type Canvas = CanvasRenderingContext2D;

/**
 * Give a canvas as many pixels as its area on the screen has, and draw on it.
 *
 * @param draw - Draws in units of CSS pixels.
 */
export function paint(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
  draw: (context: Canvas) => void
): void {
  const ratio = window.devicePixelRatio || 1;
  const context = canvas.getContext('2d');
  if (context === null) {
    return;
  }
  const [columns, lines] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== columns || canvas.height !== lines) {
    canvas.width = columns;
    canvas.height = lines;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(context);
}

/** Draw a lane. */
export function drawLane(context: Canvas, scene: IScene): void {
  drawGrid(context, scene);
  const { device, lane, theme } = scene;
  const memory = { top: lane.memory, height: lane.memoryHeight, most: device.memory_total };
  const queue = { top: lane.queue, height: lane.queueHeight, most: Math.max(scene.queueMax, 2) };
  drawSteps(context, scene, device.memory, memory, theme.accent);
  drawTotal(context, scene, memory);
  drawSteps(context, scene, device.queue, queue, theme.faint);
  drawCounts(context, scene);
  drawMoves(context, scene);
  const bars = barsAt(device.held, scene.rows, scene.range, scene.width, scene.until, scene.now);
  bars.forEach(bar => drawBar(context, scene, bar));
  drawNow(context, scene);
  scene.marks.forEach(mark => drawMark(context, scene, mark));
}

function drawGrid(context: Canvas, { ticks, range, width, lane, theme }: IScene): void {
  context.fillStyle = theme.grid;
  for (const bottom of [lane.memory + lane.memoryHeight, lane.queue + lane.queueHeight]) {
    context.fillRect(0, bottom - 0.5, width, 1);
  }
  for (const { at, isDay } of ticks) {
    context.fillStyle = isDay ? theme.line : theme.grid;
    context.globalAlpha = isDay ? 1 : 0.6;
    context.fillRect(Math.round(toPixel(at, range, width)), 0, 1, lane.height);
  }
  context.globalAlpha = 1;
}

function drawNow(context: Canvas, { range, width, lane, now, theme }: IScene): void {
  const x = Math.round(toPixel(now, range, width));
  if (x >= 0 && x <= width) {
    context.fillStyle = theme.accent;
    context.fillRect(x, 0, 1.5, lane.height);
  }
}

/** Draw a curve of steps as an area with an edge. */
function drawSteps(
  context: Canvas,
  { range, width, now }: IScene,
  steps: Steps,
  box: { top: number; height: number; most: number },
  colour: string
): void {
  const bottom = box.top + box.height;
  const right = Math.min(width, toPixel(now, range, width));
  const edge = new Path2D();
  const area = new Path2D();
  let isStarted = false;
  let lastX = 0;
  let lastY = bottom;
  const to = (x: number, y: number) => {
    if (!isStarted) {
      edge.moveTo(x, y);
      area.moveTo(x, bottom);
      isStarted = true;
    } else {
      // Where the value is zero, no edge is drawn.
      if (lastY === bottom) {
        edge.moveTo(x, lastY);
      } else {
        edge.lineTo(x, lastY);
      }
      edge.lineTo(x, y);
      area.lineTo(x, lastY);
    }
    area.lineTo(x, y);
    [lastX, lastY] = [x, y];
  };
  for (const [x, value] of curveOf(steps, range, width, now)) {
    to(x, bottom - Math.min(1, value / box.most) * box.height);
  }
  if (!isStarted || right <= lastX) {
    return;
  }
  to(right, lastY);
  area.lineTo(right, bottom);
  context.fillStyle = colour;
  context.globalAlpha = 0.22;
  context.fill(area);
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.lineWidth = 1.25;
  context.stroke(edge);
}

function drawTotal(context: Canvas, { width, theme }: IScene, box: { top: number }): void {
  context.strokeStyle = theme.faint;
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(0, Math.round(box.top) + 0.5);
  context.lineTo(width, Math.round(box.top) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

/** Write the number of waiting sessions on the queue's curve, if there is room for it. */
function drawCounts(context: Canvas, scene: IScene): void {
  const { device, range, width, lane, theme, now } = scene;
  context.fillStyle = theme.text;
  context.font = `10px ${theme.font}`;
  context.textBaseline = 'bottom';
  device.queue.forEach(([at, count], index) => {
    const left = Math.max(0, toPixel(at, range, width));
    const next = device.queue[index + 1]?.[0] ?? now;
    const right = Math.min(width, toPixel(next, range, width));
    if (count > 0 && right - left > 14) {
      context.fillText(String(count), left + 3, lane.queue + lane.queueHeight);
    }
  });
}

/** Draw a span: its fill pattern shows its state, without relying on colour. */
function drawBar(context: Canvas, scene: IScene, bar: IBar): void {
  const { theme, lane, highlighted, selected } = scene;
  const { span, left } = bar;
  const style = scene.styles.of(span.session);
  const [top, height] = [lane.bars + bar.row * lane.barPitch, lane.barHeight];
  const width = Math.max(bar.right - left - (bar.right - left > 4 ? 1 : 0), 1);
  context.globalAlpha = highlighted === null || highlighted === span.session ? 1 : 0.18;
  if (width < 4) {
    const part = span.state === 'idle' ? 0.4 : 1;
    context.fillStyle = theme.sessions[style.colour];
    context.fillRect(left, top + height * (1 - part), width, height * part);
  } else {
    const box = fillBox(context, theme, span.state, style, { left, top, width, height });
    if (selected?.type === 'span' && isOf(selected.span, span)) {
      context.strokeStyle = theme.accent;
      context.lineWidth = 2.5;
      context.stroke(box);
    }
    writeLabel(context, scene, bar, { left: Math.max(left, 0), top, right: left + width, height });
  }
  context.globalAlpha = 1;
}

/** Draw a sample of a state, of one session or of any. */
export function drawSwatch(
  context: Canvas,
  theme: ITheme,
  state: Span['state'],
  style: ISessionStyle | null,
  { width, height }: { width: number; height: number }
): void {
  const neutral = { ...theme, sessions: [theme.faint] };
  const box = { left: 0, top: 0, width, height };
  fillBox(context, style ? theme : neutral, state, style ?? { colour: 0, texture: 0 }, box);
}

/** Fill a box for a state and a session, and return its outline. */
function fillBox(
  context: Canvas,
  theme: ITheme,
  state: Span['state'],
  style: ISessionStyle,
  { left, top, width, height }: IBox
): Path2D {
  const colour = theme.sessions[style.colour];
  const box = new Path2D();
  box.roundRect(left + 0.5, top + 0.5, width - 1, height - 1, Math.min(3, width / 3));
  context.save();
  context.fillStyle = theme.ground;
  context.fill(box);
  context.clip(box);
  fillState(context, theme, state, colour, { left, top, width, height });
  context.restore();
  outline(context, theme, box, colour);
  if (style.texture > 0 && height >= 8) {
    const [dash, pitch] = style.texture === 1 ? [2, 4] : [6, 9];
    context.fillStyle = theme.text;
    for (let x = left + 3; x + dash < left + width - 2; x += pitch) {
      context.fillRect(x, top + height - 3.5, dash, 1.5);
    }
  }
  return box;
}

/** True if two spans are the same one, perhaps with newer data. */
function isOf(one: Span, other: Span): boolean {
  return one.session === other.session && one.start === other.start;
}

/** True if two events are the same one. */
function isEvent(one: ActivityEvent, other: ActivityEvent): boolean {
  return one.at === other.at && one.kind === other.kind && one.session === other.session;
}

function outline(context: Canvas, theme: ITheme, box: Path2D, colour: string): void {
  const alpha = context.globalAlpha;
  context.lineWidth = 1;
  context.strokeStyle = colour;
  context.stroke(box);
  // Bright colours alone would be hardly visible on a bright background.
  context.globalAlpha = alpha * 0.45;
  context.strokeStyle = theme.text;
  context.stroke(box);
  context.globalAlpha = alpha;
}

interface IBox {
  left: number;
  top: number;
  width: number;
  height: number;
}

/** Fill a bar: running full, idle pale, restoring hatched, migrating with arrowheads. */
function fillState(
  context: Canvas,
  theme: ITheme,
  state: Span['state'],
  colour: string,
  { left, top, width, height }: IBox
): void {
  const alpha = context.globalAlpha;
  context.fillStyle = colour;
  context.globalAlpha = alpha * (state === 'running' ? 1 : 0.22);
  context.fillRect(left, top, width, height);
  context.globalAlpha = alpha;
  if (state === 'running' || state === 'idle') {
    return;
  }
  const isMoving = state === 'migrating';
  const step = isMoving ? 9 : 7;
  const rise = isMoving ? Math.min(height / 2, 8) : height;
  context.beginPath();
  for (let x = left - height - step; x < left + width + step; x += step) {
    context.moveTo(x, top + (isMoving ? height / 2 - rise : height));
    context.lineTo(x + rise, top + (isMoving ? height / 2 : 0));
    if (isMoving) {
      context.lineTo(x, top + height / 2 + rise);
    }
  }
  context.lineWidth = 2.5;
  context.strokeStyle = colour;
  context.stroke();
  context.lineWidth = 0.75;
  context.globalAlpha = alpha * 0.6;
  context.strokeStyle = theme.text;
  context.stroke();
  context.globalAlpha = alpha;
}

function writeLabel(
  context: Canvas,
  scene: IScene,
  bar: IBar,
  box: { left: number; right: number; top: number; height: number }
): void {
  const room = Math.min(box.right, scene.width) - box.left - 10;
  if (room < 22 || box.height < 12) {
    return;
  }
  const lines = scene.label(bar);
  const { theme } = scene;
  const isTall = box.height >= 30 && lines.length > 1;
  const middle = box.top + box.height / 2 + 0.5;
  const write = (text: string, y: number, weight: string, colour: string, size: number) => {
    context.font = `${weight} ${size}px ${theme.font}`;
    context.fillStyle = colour;
    const shown = shortened(context, text, room);
    if (bar.span.state !== 'running' && bar.span.state !== 'idle' && shown) {
      // Text on a pattern needs a background of its own.
      const width = context.measureText(shown).width;
      context.fillStyle = theme.ground;
      context.globalAlpha *= 0.8;
      context.fillRect(box.left + 4, y - size * 0.6, width + 4, size * 1.2);
      context.globalAlpha /= 0.8;
      context.fillStyle = colour;
    }
    context.fillText(shown, box.left + 6, y);
  };
  context.textBaseline = 'middle';
  write(lines[0], isTall ? middle - 7 : middle, '500', theme.text, box.height < 15 ? 10 : 11.5);
  if (isTall) {
    write(lines[1], middle + 7.5, '400', theme.text, 10.5);
  }
}

const widths = new Map<string, number>();

/** Return as much of a text as fits; measuring is expensive, so widths are cached. */
function shortened(context: Canvas, text: string, room: number): string {
  const measured = (part: string): number => {
    const key = `${context.font}\n${part}`;
    let width = widths.get(key);
    if (width === undefined) {
      if (widths.size > 5000) {
        widths.clear();
      }
      width = context.measureText(part).width;
      widths.set(key, width);
    }
    return width;
  };
  const whole = measured(text);
  if (whole <= room) {
    return text;
  }
  const count = Math.floor((room / whole) * text.length) - 1;
  return count >= 2 ? `${text.slice(0, count).trimEnd()}…` : '';
}

function drawMoves(context: Canvas, scene: IScene): void {
  context.save();
  context.translate(0, -scene.top);
  scene.moves.forEach(move => drawMove(context, scene, move));
  context.restore();
}

/** Draw the migration of a session from one lane to another. */
function drawMove(context: Canvas, scene: IScene, move: IMovePath): void {
  const { range, width, theme, styles, highlighted } = scene;
  const x = toPixel(move.at, range, width);
  if (x < -30 || x > width + 30) {
    return;
  }
  const bend = move.to > move.from ? 10 : -10;
  const colour = theme.sessions[styles.of(move.session).colour];
  const way = new Path2D();
  way.moveTo(x, move.from);
  way.bezierCurveTo(x - 8, move.from + 2 * bend, x - 8, move.to - 2 * bend, x, move.to);
  const head = new Path2D();
  head.moveTo(x + 1, move.to);
  head.lineTo(x - 8, move.to - bend / 3);
  head.lineTo(x - 2, move.to - bend * 0.75);
  head.closePath();
  context.globalAlpha = highlighted === null || highlighted === move.session ? 1 : 0.18;
  for (const [style, lineWidth] of [
    [theme.faint, 2.5],
    [colour, 1.5]
  ] as const) {
    context.strokeStyle = style;
    context.lineWidth = lineWidth;
    context.stroke(way);
  }
  context.fillStyle = theme.text;
  context.fill(head);
  context.globalAlpha = 1;
}

const MARK_SIZE = 13;

/** Draw a mark: an icon, and the number of events if there are several. */
function drawMark(context: Canvas, scene: IScene, mark: IMark): void {
  const { range, width, theme, lane, highlighted, selected } = scene;
  const x = toPixel(mark.at, range, width);
  if (x < -20 || x > width + 20) {
    return;
  }
  const isFaint = highlighted !== null && !mark.events.some(each => each.session === highlighted);
  context.globalAlpha = isFaint ? 0.18 : 1;
  const isBad = mark.kind === 'failed' || mark.kind === 'lost';
  const colour = isBad ? theme.error : theme.text;
  context.fillStyle = colour;
  context.globalAlpha *= 0.5;
  context.fillRect(Math.round(x), lane.marks + MARK_SIZE + 2, 1, LANE.marks - MARK_SIZE - 2);
  context.globalAlpha /= 0.5;
  drawIcon(context, kindIcons[mark.kind], x - MARK_SIZE / 2, lane.marks, MARK_SIZE, colour);
  if (mark.events.length > 1) {
    context.font = `600 9px ${theme.font}`;
    context.textBaseline = 'top';
    context.fillStyle = theme.faint;
    context.fillText(String(mark.events.length), x + MARK_SIZE / 2 + 1, lane.marks - 1);
  }
  if (selected?.type === 'event' && mark.events.some(each => isEvent(each, selected.event))) {
    context.strokeStyle = theme.accent;
    context.lineWidth = 2;
    context.beginPath();
    context.roundRect(x - 9, lane.marks - 2.5, 18, 18, 3);
    context.stroke();
  }
  context.globalAlpha = 1;
}

/** Minimum distance between marks, in pixels. */
export const MARK_PITCH = 26;

/** Draw the axis of time. */
export function drawAxis(
  context: Canvas,
  scene: Pick<IScene, 'range' | 'width' | 'theme' | 'ticks' | 'now'>,
  height: number,
  label: (tick: ITick) => string
): void {
  const { range, width, theme, ticks, now } = scene;
  context.textBaseline = 'middle';
  for (const tick of ticks) {
    const x = Math.round(toPixel(tick.at, range, width));
    context.fillStyle = theme.line;
    context.fillRect(x, height - 5, 1, 5);
    context.fillStyle = tick.isDay ? theme.text : theme.faint;
    context.font = `${tick.isDay ? 600 : 400} 11px ${theme.font}`;
    const text = label(tick);
    const half = context.measureText(text).width / 2;
    const left = Math.min(Math.max(x - half, 2), width - 2 * half - 2);
    if (Math.abs(left + half - x) < half) {
      context.fillText(text, left, height / 2 - 1);
    }
  }
  const x = toPixel(now, range, width);
  if (x >= 0 && x <= width) {
    context.fillStyle = theme.accent;
    context.beginPath();
    context.moveTo(x - 4, height - 6);
    context.lineTo(x + 5.5, height - 6);
    context.lineTo(x + 0.75, height);
    context.closePath();
    context.fill();
  }
}

/** The longest queue of any device within a time. */
export function queueMax(devices: readonly DeviceActivity[], range: IRange): number {
  return devices.reduce(
    (most, { queue }) => Math.max(most, greatest(queue, range.start, range.end)),
    0
  );
}
