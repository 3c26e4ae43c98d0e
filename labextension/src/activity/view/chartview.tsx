import type { TranslationBundle } from '@jupyterlab/translation';
import React, { useCallback, useEffect, useMemo, useRef, useState } from 'react';
import { deviceIcon, stateIcons } from '../../ui/icons';
import { SessionName } from '../../ui/sessionname';
import { durationText, percentText } from '../../text/format';
import { deviceName, sessionName } from '../../text/words';
import {
  hitAt,
  barEdges,
  type IHit,
  type ISelection,
  isSame,
  itemOf,
  pointedAt,
  sessionOf,
  topsOf
} from './hittest';
import { type IScene, MARK_PITCH, queueMax } from './chart';
import {
  type Activity,
  busySeconds,
  DAY,
  type DeviceActivity,
  endOf,
  holdersAt,
  moves,
  valueAt
} from '../data/data';
import { useSize } from './hooks';
import { Axis, AXIS_HEIGHT, Gutter, type IReadout, Plot } from './lane';
import {
  type IBar,
  type Item,
  itemsOf,
  laneOf,
  type SessionStyles,
  marksOf,
  rowsOf,
  spaced
} from '../data/layout';
import {
  type IWindow,
  localOffset,
  panned,
  rangeOf,
  showing,
  tickSeconds,
  ticks,
  toMoment,
  toPixel,
  zoomed
} from '../data/range';
import { type Clock, itemSentence, memoryText } from '../data/text';
import type { ITheme } from './theme';
import { Tooltip } from './tooltip';

/** Minimum movement of the pointer that counts as dragging, in pixels. */
const DRAG_MIN = 4;

interface IChartProps {
  record: Activity;
  window: IWindow;
  now: number;
  theme: ITheme;
  styles: SessionStyles;
  highlighted: string | null;
  clock: Clock;
  trans: TranslationBundle;
  onWindow: (change: (before: IWindow) => IWindow) => void;
  onWidth: (width: number) => void;
  onOpen: (session: string) => void;
}

/** The timelines of all devices on one axis. */
export function Chart(props: IChartProps): React.ReactElement {
  const { record, window, now, theme, styles, highlighted, clock, trans, onWindow } = props;
  const root = useRef<HTMLDivElement>(null);
  const ruler = useRef<HTMLDivElement>(null);
  const width = useSize(ruler).width;
  const { height } = useSize(root);
  const [cursor, setCursor] = useState<number | null>(null); // the moment that is pointed at
  const [hit, setAim] = useState<IHit | null>(null);
  const [selection, setSelection] = useState<ISelection | null>(null);
  const [sentence, setSentence] = useState('');
  const drag = useRef<{ x: number; window: IWindow; now: number; isMoving: boolean } | null>(null);
  const range = rangeOf(window, now);
  const { start, end } = range;
  const { until, devices } = record;
  const { onWidth } = props;

  useEffect(() => {
    if (width > 0) {
      onWidth(width);
    }
  }, [onWidth, width]);

  const layout = useMemo(
    () =>
      devices.map(device => {
        const rows = rowsOf(device.held, until);
        const room = (height - AXIS_HEIGHT) / devices.length;
        return { device, rows, lane: laneOf(rows.count, room) };
      }),
    [devices, until, height]
  );
  const ways = useMemo(() => moves(record), [record]);
  const apart = tickSeconds(range, width, window.seconds < 900 ? 78 : 64);
  const scenes = useMemo<IScene[]>(() => {
    const shown = { start, end };
    const marksApart = ((end - start) / Math.max(width, 1)) * MARK_PITCH;
    const shownTicks = ticks(shown, apart, localOffset);
    const most = queueMax(devices, shown);
    const tops = topsOf(layout.map(({ lane }) => lane.height));
    const visible = spaced(ways, marksApart / 2).filter(({ at }) => at > start && at < end);
    const drawn = visible.flatMap(move => {
      const from = barEdges(layout, tops, move.source, move.session, move.at);
      const to = barEdges(layout, tops, move.target, move.session, move.at);
      if (from === null || to === null) {
        return [];
      }
      const isDown = to.top > from.top;
      return [
        isDown
          ? { ...move, from: from.bottom, to: to.top }
          : { ...move, from: from.top, to: to.bottom }
      ];
    });
    return layout.map(({ device, rows, lane }, index) => ({
      device,
      rows,
      lane,
      marks: marksOf(record.events, device.id, marksApart),
      top: tops[index],
      moves: drawn,
      ticks: shownTicks,
      range: shown,
      width,
      until,
      now,
      queueMax: most,
      styles,
      theme,
      highlighted,
      selected: selection?.device === device.id ? selection.item : null,
      label: (bar: IBar) => [
        sessionName(bar.span, trans),
        [bar.span.owner, durationText(endOf(bar.span, until, now) - bar.span.start, trans)]
          .filter(Boolean)
          .join(' · ')
      ]
    }));
  }, [
    layout,
    ways,
    record,
    start,
    end,
    width,
    now,
    apart,
    theme,
    styles,
    highlighted,
    selection,
    trans
  ]);

  const pointAt = (event: React.PointerEvent): void => {
    const box = ruler.current!.getBoundingClientRect();
    const x = event.clientX - box.left;
    const around = root.current!.getBoundingClientRect();
    const plot = (event.target as Element).closest<HTMLElement>('[data-device]');
    const scene = scenes.find(each => each.device.id === plot?.dataset.device);
    if (x < 0 || x > width) {
      setCursor(null);
      setAim(null);
      return;
    }
    setCursor(toMoment(x, range, width));
    const y = plot ? event.clientY - plot.getBoundingClientRect().top : 0;
    const pointed = scene ? pointedAt(scene, x, y, trans) : null;
    setAim(pointed && { pointed, x: event.clientX - around.left, y: event.clientY - around.top });
  };

  /** Select a span or event: mark it, scroll it into view, and describe it. */
  const select = useCallback(
    (device: string, item: Item | null): void => {
      setSelection(item && { device, item });
      setSentence(item ? itemSentence(item, device, until, now, clock, trans) : '');
      if (item) {
        onWindow(before => showing(before, item.start, now));
      }
    },
    [until, now, clock, trans, onWindow]
  );

  // The position of the selected item's tip is known only when it is in view.
  const chosen = selection && hitAt(selection, scenes, range, width, root.current);

  const onKey = (event: React.KeyboardEvent): void => {
    const plot = (event.target as Element).closest<HTMLElement>('[data-device]');
    const anchor =
      selection && plot
        ? Math.min(Math.max(toPixel(selection.item.start, range, 1), 0), 1)
        : window.end === null
          ? 1
          : 0.5;
    const isHandled = ((): boolean => {
      if (event.ctrlKey || event.metaKey || event.altKey) {
        return false;
      }
      switch (event.key) {
        case '+':
        case '=':
          onWindow(before => zoomed(before, 0.5, now, anchor));
          return true;
        case '-':
          onWindow(before => zoomed(before, 2, now, anchor));
          return true;
        case 'PageUp':
          onWindow(before => panned(before, -0.8, now));
          return true;
        case 'PageDown':
          onWindow(before => panned(before, 0.8, now));
          return true;
        case 'Escape':
          setSelection(null);
          setAim(null);
          return true;
      }
      const direction = event.key === 'ArrowLeft' ? -1 : event.key === 'ArrowRight' ? 1 : 0;
      if (direction !== 0 && (event.shiftKey || !plot)) {
        onWindow(before => panned(before, direction / 8, now));
        return true;
      }
      return plot !== null && onPlotKey(event.key, direction, plot);
    })();
    if (isHandled) {
      event.preventDefault();
      event.stopPropagation();
    }
  };

  const onPlotKey = (key: string, direction: number, plot: HTMLElement): boolean => {
    const device = plot.dataset.device!;
    const { held } = devices.find(each => each.id === device)!;
    if (key === 'ArrowUp' || key === 'ArrowDown') {
      const plots = [...root.current!.querySelectorAll<HTMLElement>('[data-device]')];
      plots[plots.indexOf(plot) + (key === 'ArrowUp' ? -1 : 1)]?.focus();
      return true;
    }
    if (key === 'Enter' && selection?.device === device) {
      props.onOpen(sessionOf(selection.item));
      return true;
    }
    if (direction === 0 && key !== 'Home' && key !== 'End') {
      return false;
    }
    const items = itemsOf(held, record.events, device);
    const index =
      selection?.device === device
        ? items.findIndex(item => isSame(item, selection.item))
        : direction < 0
          ? items.filter(item => item.start <= end).length
          : items.filter(item => item.start < start).length - 1;
    const next = key === 'Home' ? 0 : key === 'End' ? items.length - 1 : index + direction;
    if (items.length > 0) {
      setAim(null);
      select(device, items[Math.min(Math.max(next, 0), items.length - 1)]);
    }
    return true;
  };

  // React registers passive wheel listeners: zooming would then also scroll.
  const onWheel = useRef<(event: WheelEvent) => void>(() => undefined);
  onWheel.current = event => {
    const isZoom = event.ctrlKey || event.metaKey;
    const sideways = event.shiftKey && event.deltaX === 0 ? event.deltaY : event.deltaX;
    if (!isZoom && Math.abs(sideways) <= Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      return;
    }
    event.preventDefault();
    const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    if (isZoom) {
      const x = event.clientX - ruler.current!.getBoundingClientRect().left;
      const factor = Math.exp((Math.max(Math.min(event.deltaY * unit, 100), -100) / 100) * 0.6);
      const anchor = Math.min(Math.max(x / Math.max(width, 1), 0), 1);
      onWindow(before => zoomed(before, factor, now, anchor));
    } else {
      onWindow(before => panned(before, (sideways * unit) / Math.max(width, 1), now));
    }
    setAim(null);
  };
  useEffect(() => {
    const { current } = root;
    const listen = (event: WheelEvent) => onWheel.current(event);
    current?.addEventListener('wheel', listen, { passive: false });
    return () => current?.removeEventListener('wheel', listen);
  }, []);

  const onPointerDown = (event: React.PointerEvent): void => {
    if (event.button === 0 && (event.target as Element).closest('[data-device], [role=slider]')) {
      drag.current = { x: event.clientX, window, now, isMoving: false };
    }
  };
  const onPointerMove = (event: React.PointerEvent): void => {
    const from = drag.current;
    if (from === null) {
      pointAt(event);
      return;
    }
    const moved = event.clientX - from.x;
    if (!from.isMoving && Math.abs(moved) >= DRAG_MIN) {
      from.isMoving = true;
      root.current!.setPointerCapture(event.pointerId);
      setAim(null);
      setCursor(null);
    }
    if (from.isMoving) {
      onWindow(() => panned(from.window, -moved / Math.max(width, 1), from.now));
    }
  };
  const onPointerUp = (event: React.PointerEvent): void => {
    const wasDragged = drag.current?.isMoving ?? true;
    drag.current = null;
    const plot = (event.target as Element).closest<HTMLElement>('[data-device]');
    if (!wasDragged && plot) {
      select(plot.dataset.device!, hit && itemOf(hit.pointed));
    }
  };
  const onPointerLeave = (): void => {
    if (!drag.current?.isMoving) {
      drag.current = null;
      setCursor(null);
      setAim(null);
    }
  };

  const moment = Math.min(cursor ?? end, now);
  const shownAim = hit ?? chosen;
  const seconds = Math.max(Math.min(end, now) - start, 1);
  const readoutOf = (device: DeviceActivity): IReadout => {
    const holders = holdersAt(device.held, moment, until);
    const first = holders[0];
    const icon = first && stateIcons[first.state];
    const busy = busySeconds(device.held, start, Math.min(end, now), until, now) / seconds;
    return {
      name: deviceName(device.id),
      busy: trans.__('%1 in use', percentText(busy, trans)),
      memory: memoryText(valueAt(device.memory, moment) ?? 0, device.memory_total),
      waiting: String(valueAt(device.queue, moment) ?? 0),
      holder: first ? (
        <>
          <icon.react tag="span" className="jp-SingActivity-icon" />
          <SessionName className="jp-SingActivity-cut" name={sessionName(first, trans)} />
          {holders.length > 1 && (
            <span className="jp-mod-faint">{trans.__('+%1', holders.length - 1)}</span>
          )}
        </>
      ) : (
        <span className="jp-mod-faint">{trans.__('Free')}</span>
      )
    };
  };
  const words = { memory: trans.__('Memory'), waiting: trans.__('Waiting') };
  return (
    <div
      className="jp-SingActivity-chart"
      ref={root}
      onKeyDown={onKey}
      onPointerDown={onPointerDown}
      onPointerMove={onPointerMove}
      onPointerUp={onPointerUp}
      onPointerCancel={onPointerLeave}
      onPointerLeave={onPointerLeave}
      onDoubleClick={() => selection && props.onOpen(sessionOf(selection.item))}
    >
      <div className="jp-SingActivity-scroll">
        <div className="jp-SingActivity-axisRow" style={{ height: AXIS_HEIGHT }}>
          <div className="jp-SingActivity-gutter">
            <time>{cursor === null ? clock.date(moment) : clock.full(cursor)}</time>
          </div>
          <div className="jp-SingActivity-ruler" ref={ruler}>
            <Axis
              scene={{ range, width, theme, now, ticks: ticks(range, apart, localOffset) }}
              label={tick => clock.tick(tick, apart)}
              name={trans.__('Time shown')}
              text={clock.range(range)}
              bounds={{ start: now - DAY, end: now }}
            />
          </div>
        </div>
        {scenes.map(scene => {
          const readout = readoutOf(scene.device);
          return (
            <div
              key={scene.device.id}
              className="jp-SingActivity-lane"
              style={{ height: scene.lane.height }}
            >
              <Gutter
                lane={scene.lane}
                icon={<deviceIcon.react tag="span" className="jp-SingActivity-icon" />}
                readout={readout}
                words={words}
              />
              <Plot
                scene={scene}
                label={trans.__(
                  'Timeline of %1: %2, memory %3, %4 waiting',
                  readout.name,
                  readout.busy,
                  readout.memory,
                  readout.waiting
                )}
                describedBy="jp-SingActivity-keys"
              />
            </div>
          );
        })}
      </div>
      {cursor !== null && (
        <div
          className="jp-SingActivity-cursor"
          style={{ transform: `translateX(${toPixel(cursor, range, width)}px)` }}
        />
      )}
      {shownAim && <Tooltip {...shownAim} until={until} now={now} clock={clock} trans={trans} />}
      <div className="jp-SingActivity-hidden" id="jp-SingActivity-keys">
        {trans.__(
          'Left and right arrow: previous and next entry. Shift with an arrow, Page Up and Page Down: move in time. Plus and minus: zoom. Enter: open the notebook.'
        )}
      </div>
      <div className="jp-SingActivity-hidden" aria-live="polite">
        {sentence}
      </div>
    </div>
  );
}
