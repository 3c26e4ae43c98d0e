import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';
import type { SingClient } from '../../api/client';
import type { ISingModel } from '../../api/tokens';
import { type Activity, DAY, merge } from './data';
import type { IRange } from './range';

/** Delay of a request after a change, so that many changes need only one. */
const SOON_MS = 1500;
/** Delay of a retry after a failure. */
const RETRY_MS = 15_000;
/** Seconds of known data that are requested again: new data is reported with a short delay. */
const OVERLAP = 2;

/** Resolution of the record from a time on. */
interface IDetail {
  since: number;
  resolution: number;
}

/**
 * The record of the last day, kept up to date while it is visible.
 *
 * Note [Detail]: the record is requested once, at the resolution at which a screen can show a day.
 * When the user zooms in, the later part is requested again at a finer resolution. After that,
 * whenever the model reports a change, only new data is requested. Nothing is requested while the
 * view is hidden.
 */
export class ActivityPoller implements IDisposable {
  constructor(
    private readonly _client: Pick<SingClient, 'activity'>,
    model: ISingModel
  ) {
    model.changed.connect(this._onChange, this);
  }

  /** The record; null before the first answer. */
  get record(): Activity | null {
    return this._record;
  }

  /** Why the last request failed; empty if it did not. */
  get problem(): string {
    return this._problem;
  }

  /** Emitted after answers and failures, and when the view is shown or hidden. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** True while the view is visible. */
  get isVisible(): boolean {
    return this._isVisible;
  }

  set isVisible(value: boolean) {
    if (value === this._isVisible || this._isDisposed) {
      return;
    }
    this._isVisible = value;
    if (value) {
      this._isStale = true;
      this._schedule(0);
    } else {
      window.clearTimeout(this._timer);
      this._timer = undefined;
    }
    this._changed.emit();
  }

  /** The server's clock, in seconds since the epoch. */
  now(): number {
    return Date.now() / 1000 + this._ahead;
  }

  /** Set which time is shown, and in how many pixels. */
  show({ start, end }: IRange, width: number): void {
    this._shown = { since: start, resolution: rounded((end - start) / width) };
    this._width = width;
    if (this._isVisible && this._record !== null && this._isTooCoarse()) {
      this._schedule(SOON_MS / 5);
    }
  }

  /** Request the record at once. */
  retry(): void {
    this._isStale = true;
    window.clearTimeout(this._timer);
    this._timer = undefined;
    this._schedule(0);
  }

  dispose(): void {
    this._isDisposed = true;
    this._isVisible = false;
    window.clearTimeout(this._timer);
    Signal.clearData(this);
  }

  private _onChange(): void {
    this._isStale = true;
    if (this._isVisible) {
      this._schedule(SOON_MS);
    }
  }

  /**
   * True if the shown part could be known at a resolution that is finer by enough to be worth a
   * request.
   */
  private _isTooCoarse(): boolean {
    const { since, resolution } = this._shown;
    return this._details.some(
      (detail, index) =>
        detail.resolution > resolution && (this._details[index + 1]?.since ?? Infinity) > since
    );
  }

  private _schedule(delay: number): void {
    if (this._isVisible && !this._isRequesting) {
      this._timer ??= window.setTimeout(() => {
        this._timer = undefined;
        void this._fetch();
      }, delay);
    }
  }

  private async _fetch(): Promise<void> {
    this._isRequesting = true;
    this._isStale = false;
    const record = this._record;
    const last = this._details[this._details.length - 1];
    let request: IDetail;
    if (record === null) {
      request = { since: this.now() - DAY, resolution: rounded(DAY / this._width) };
    } else if (this._isTooCoarse()) {
      request = { ...this._shown, since: Math.max(this._shown.since, record.since) };
    } else {
      request = {
        since: Math.max(record.until - OVERLAP, record.since),
        resolution: last.resolution
      };
    }
    try {
      const response = await this._client.activity(Math.floor(request.since), request.resolution);
      this._ahead = response.until - Date.now() / 1000;
      this._record = merge(record, response);
      const before = this._record === response ? [] : this._details;
      this._details = withDetail(before, { since: response.since, resolution: request.resolution });
      this._problem = '';
    } catch (error) {
      this._isStale = true;
      this._problem = (error as Error).message;
    }
    this._isRequesting = false;
    if (!this._isDisposed) {
      this._changed.emit();
      if (this._isStale || this._isTooCoarse()) {
        this._schedule(this._problem ? RETRY_MS : SOON_MS);
      }
    }
  }

  private readonly _changed = new Signal<this, void>(this);
  private _record: Activity | null = null;
  private _problem = '';
  private _details: readonly IDetail[] = [];
  private _shown: IDetail = { since: 0, resolution: 60 };
  private _width = 1440;
  private _ahead = 0;
  private _isVisible = false;
  private _isStale = true;
  private _isRequesting = false;
  private _isDisposed = false;
  private _timer: number | undefined;
}

/**
 * Return a power of two of seconds, down to a sixteenth, so that not every zoom step needs a
 * request.
 */
function rounded(seconds: number): number {
  return 2 ** Math.max(Math.floor(Math.log2(seconds)), -4);
}

/** Add the resolution of the record from a time on. */
export function withDetail(before: readonly IDetail[], added: IDetail): IDetail[] {
  const kept = before.filter(each => each.since < added.since);
  const last = kept[kept.length - 1];
  return last?.resolution === added.resolution ? kept : [...kept, added];
}
