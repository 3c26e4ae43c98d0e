import type { IThemeManager } from '@jupyterlab/apputils';
import type { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import React, { useCallback, useEffect, useMemo, useRef, useState } from 'react';
import { activityIcon, stateIcons } from '../../ui/icons';
import { DOMAIN, type ISingModel } from '../../api/tokens';
import { Chart } from './chartview';
import { DAY, uses } from '../data/data';
import type { ActivityPoller } from '../data/activitypoller';
import { Header } from './header';
import { usePixelRatio, usePresent, useSignal, useTheme } from './hooks';
import { laneOf, SessionStyles } from '../data/layout';
import { Legend } from './legend';
import { type IWindow, rangeOf, zoomed } from '../data/range';
import { ActivityTable } from './table';
import { Clock } from '../data/text';
import { COLOURS } from './theme';

/** State of the view that is saved with the layout. */
export interface IViewState {
  seconds: number;
  /** End of the shown time, in seconds since the epoch; null follows the present. */
  end: number | null;
  isTable: boolean;
}

export const INITIAL: IViewState = { seconds: 3600, end: null, isTable: false };

/** Return a complete state from one that is partial, or of another version. */
export function viewState(saved: Partial<Record<keyof IViewState, unknown>>): IViewState {
  const { seconds, end, isTable } = saved;
  return {
    seconds: typeof seconds === 'number' && seconds > 0 && seconds <= DAY ? seconds : 3600,
    end: typeof end === 'number' ? end : null,
    isTable: isTable === true
  };
}

/** Usual width of a chart: used for requests before the width is known. */
const WIDTH = 1000;

interface IViewProps {
  poller: ActivityPoller;
  model: ISingModel;
  initial: IViewState;
  themeChanged?: ISignal<unknown, unknown>;
  trans: TranslationBundle;
  onState: (state: IViewState) => void;
  onOpen: (session: string) => void;
}

/** The view "GPU activity". */
export function ActivityView(props: IViewProps): React.ReactElement {
  const { poller, model, trans, onState } = props;
  useSignal(poller.changed);
  const root = useRef<HTMLDivElement>(null);
  const theme = useTheme(root, props.themeChanged);
  const ratio = usePixelRatio();
  const clock = useMemo(() => new Clock(document.documentElement.lang || undefined), []);
  const styles = useMemo(() => new SessionStyles(COLOURS), []);
  const [state, setState] = useState(props.initial);
  const [width, setWidth] = useState(WIDTH);
  const [hovered, setHovered] = useState<string | null>(null);
  const [pinned, setPinned] = useState<string | null>(null);

  const { record } = poller;
  const { seconds, isTable } = state;
  const [first, last] = [poller.now() - DAY, poller.now()];
  // When a layout is restored, the shown time may be more than a day ago.
  const end = state.end !== null && state.end - seconds >= first - 1 ? state.end : null;
  const isMoving = poller.isVisible && (end === null || end > last);
  // One update for each pixel by which the present moves.
  const beat = isMoving ? Math.max(seconds / width, 1) : 0;
  const now = usePresent(() => poller.now(), beat);
  const window: IWindow = useMemo(() => ({ seconds, end }), [seconds, end]);
  const range = rangeOf(window, now);

  useEffect(() => onState(state), [onState, state]);
  useEffect(() => {
    poller.show(range, width);
  }, [poller, seconds, end, width, record]);

  const onWindow = useCallback(
    (change: (before: IWindow) => IWindow) =>
      setState(before => ({ ...before, ...change(before) })),
    []
  );
  const highlighted = hovered ?? pinned;
  const isEmpty =
    record !== null &&
    record.events.length === 0 &&
    record.devices.every(device => device.held.length === 0);
  // Rounded to a fraction of the shown time, so that the legend does not change with every pixel.
  const grain = Math.max(seconds / 200, 1);
  const [from, to] = [
    Math.floor(range.start / grain) * grain,
    Math.ceil(range.end / grain) * grain
  ];
  const legend = useMemo(
    () => (record === null ? [] : uses(record, from, Math.min(to, poller.now()), poller.now())),
    [poller, record, from, to]
  );
  const kinds = useMemo(() => new Set(record?.events.map(({ kind }) => kind)), [record]);
  // Styles are assigned in the order in which sessions came, whichever part is drawn.
  useMemo(() => {
    record?.devices
      .flatMap(({ held }) => held)
      .sort((one, other) => one.start - other.start)
      .forEach(({ session }) => styles.of(session));
  }, [styles, record]);

  return (
    <div className="jp-SingActivity-view" ref={root} data-ratio={ratio}>
      <Header
        seconds={seconds}
        follows={end === null}
        isTable={isTable}
        text={clock.range({ start: range.start, end: Math.min(range.end, now) })}
        problem={record === null ? '' : poller.problem}
        trans={trans}
        onPreset={value =>
          onWindow(before => zoomed(before, value / before.seconds, now, end === null ? 1 : 0.5))
        }
        onZoom={factor => onWindow(before => zoomed(before, factor, now, end === null ? 1 : 0.5))}
        onFollow={() => setState({ ...state, end: end === null ? range.end : null })}
        onTable={() => setState({ ...state, isTable: !isTable })}
        onRetry={() => poller.retry()}
      />
      {record === null ? (
        poller.problem ? (
          <Notice icon={stateIcons.failed} text={poller.problem} role="alert">
            <button type="button" className="jp-mod-styled" onClick={() => poller.retry()}>
              {trans.__('Retry')}
            </button>
          </Notice>
        ) : (
          <Skeleton count={Math.max(model.devices.length, 2)} text={trans.__('Loading…')} />
        )
      ) : isEmpty ? (
        <Notice
          icon={activityIcon}
          text={trans.__(
            'No GPU was used in the last 24 hours. Run a cell that uses CUDA to see it here.'
          )}
        />
      ) : isTable ? (
        <ActivityTable record={record} range={range} now={now} clock={clock} trans={trans} />
      ) : (
        <Chart
          key={ratio}
          record={record}
          window={window}
          now={now}
          theme={theme}
          styles={styles}
          highlighted={highlighted}
          clock={clock}
          trans={trans}
          onWindow={onWindow}
          onWidth={setWidth}
          onOpen={props.onOpen}
        />
      )}
      <Legend
        uses={legend}
        kinds={kinds}
        styles={styles}
        theme={theme}
        highlighted={highlighted}
        pinned={pinned}
        onHighlight={setHovered}
        onPin={setPinned}
        trans={trans}
      />
    </div>
  );
}

/** A sentence in place of the chart. */
function Notice(props: {
  icon: typeof activityIcon;
  text: string;
  role?: string;
  children?: React.ReactNode;
}): React.ReactElement {
  const { icon, text, role, children } = props;
  return (
    <div className="jp-SingActivity-notice" role={role}>
      <icon.react tag="span" className="jp-SingActivity-icon" />
      <p>{text}</p>
      {children}
    </div>
  );
}

/** Placeholder before the first answer: empty lanes. */
function Skeleton({ count, text }: { count: number; text: string }): React.ReactElement {
  return (
    <div className="jp-SingActivity-skeleton" role="status" aria-label={text}>
      {Array.from({ length: count }, (_, index) => (
        <div key={index} style={{ height: laneOf(1).height }}>
          <span />
          <span />
        </div>
      ))}
    </div>
  );
}

/** A panel with the view; its poller is active only while it is visible. */
export class ActivityPanel extends ReactWidget {
  constructor(private readonly _options: ActivityPanel.IOptions) {
    super();
    this.addClass('jp-SingActivity');
    this._state = _options.state;
  }

  /** State that is saved with the layout. */
  get state(): IViewState {
    return this._state;
  }

  /** Emitted after the state has changed. */
  get stateChanged(): ISignal<this, void> {
    return this._stateChanged;
  }

  override dispose(): void {
    if (!this.isDisposed) {
      document.removeEventListener('visibilitychange', this._updateVisibility);
      this._options.poller.dispose();
      Signal.clearData(this);
      super.dispose();
    }
  }

  protected override render(): React.ReactElement {
    const { poller, model, translator, themes, onOpen } = this._options;
    return (
      <ActivityView
        poller={poller}
        model={model}
        initial={this._state}
        themeChanged={themes?.themeChanged}
        trans={translator.load(DOMAIN)}
        onOpen={onOpen}
        onState={this._onState}
      />
    );
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    document.addEventListener('visibilitychange', this._updateVisibility);
    this._updateVisibility();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this._updateVisibility();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this._updateVisibility();
  }

  protected override onBeforeDetach(message: Message): void {
    document.removeEventListener('visibilitychange', this._updateVisibility);
    this._options.poller.isVisible = false;
    super.onBeforeDetach(message);
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.tabIndex = -1;
    this.node.focus();
  }

  private readonly _updateVisibility = (): void => {
    this._options.poller.isVisible = this.isVisible && !document.hidden;
  };

  private readonly _onState = (state: IViewState): void => {
    if (state !== this._state) {
      this._state = state;
      this._stateChanged.emit();
    }
  };

  private _state: IViewState;
  private readonly _stateChanged = new Signal<this, void>(this);
}

export namespace ActivityPanel {
  export interface IOptions {
    poller: ActivityPoller;
    model: ISingModel;
    state: IViewState;
    translator: ITranslator;
    themes: IThemeManager | null;
    /** Called with the id of a session whose notebook is to be opened. */
    onOpen: (session: string) => void;
  }
}
