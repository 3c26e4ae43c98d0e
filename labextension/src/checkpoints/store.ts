import type { IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';
import type { SingClient } from '../api/client';
import { PROGRESS_DELAY_MS, fraction } from '../model/progress';
import type { Checkpoint, ISingModel, Session } from '../api/tokens';

/** Work in progress on a checkpoint. */
export interface IDoing {
  readonly verb: 'checkpoint' | 'restore' | 'delete';
  /** Progress from 0 to 1; null if unknown. */
  readonly done: number | null;
  /** True if it has taken long enough to be shown. */
  readonly isLong: boolean;
}

/** A checkpoint that is being saved. */
export interface IArriving {
  readonly name: string;
  /** The session's name. */
  readonly session: string;
}

/**
 * The checkpoints, kept up to date while a view shows them.
 *
 * Note [Unseen lists]: while no view is visible, nothing is requested from the server. While one is, the
 * list is requested at the beginning, and when sessions show that a checkpoint was made: their last
 * checkpoint has changed, or a save has ended.
 */
export class CheckpointStore implements IDisposable {
  constructor(client: SingClient, model: ISingModel) {
    this._client = client;
    this._model = model;
    this._model.changed.connect(this._onModel, this);
  }

  /** All checkpoints, newest first. */
  get all(): readonly Checkpoint[] {
    return this._all;
  }

  /** True if the server has answered at least once. */
  get isReady(): boolean {
    return this._isReady;
  }

  /** Why the list may be out of date; empty if it is not. */
  get problem(): string {
    return this._problem;
  }

  /** Progress of work that takes longer than half a second, if known; null if there is none. */
  get working(): { done: number | null } | null {
    return this._working;
  }

  /** Emitted after changes. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get isDisposed(): boolean {
    return this._isDisposed;
  }

  /** True while a view is visible; see Note [Unseen lists]. */
  get isWatched(): boolean {
    return this._observing !== null;
  }

  set isWatched(watched: boolean) {
    if (watched === this.isWatched) {
      return;
    }
    this._observing?.dispose();
    this._observing = watched ? this._model.observe() : null;
    if (watched) {
      this._mark = mark(this._model.sessions);
      void this.refresh();
    }
  }

  /** Return the work in progress on a checkpoint, started by any client. */
  doing(name: string): IDoing | null {
    const ours = this._ours.get(name);
    const session = this._model.sessions.find(each => each.progress?.checkpoint === name);
    const verb = session?.progress?.verb ?? ours?.verb;
    // Preparing is not work on a checkpoint.
    return verb && verb !== 'prepare'
      ? { verb, done: fraction(session), isLong: ours?.isLong ?? true }
      : null;
  }

  /** Checkpoints that are being saved and are not in the list yet. */
  get arriving(): readonly IArriving[] {
    return [...this._arriving.values()].filter(
      ({ name }) => !this._all.some(each => each.name === name)
    );
  }

  /** Request the list. Never rejects: `problem` holds the error. */
  async refresh(): Promise<void> {
    this._isStale = true;
    this._asking ??= this._ask();
    await this._asking;
  }

  /** Do work on a checkpoint, and show its progress; returns its result. */
  async during<T>(verb: IDoing['verb'], name: string, work: () => Promise<T>): Promise<T> {
    const ours = { verb, isLong: false };
    this._ours.set(name, ours);
    const timer = setTimeout(() => {
      ours.isLong = true;
      this._changed.emit();
    }, PROGRESS_DELAY_MS);
    this._changed.emit();
    try {
      return await work();
    } finally {
      clearTimeout(timer);
      this._ours.delete(name);
      this._changed.emit();
    }
  }

  /**
   * Delete checkpoints one after the other, as far as possible.
   *
   * @returns Failures: for each checkpoint that still exists, the reason.
   */
  async delete(names: readonly string[]): Promise<Map<string, string>> {
    const failed = new Map<string, string>();
    let done = 0;
    const share = () => (names.length > 1 ? done / names.length : null);
    await this._patiently(share, async noted => {
      for (const name of names) {
        try {
          await this.during('delete', name, () => this._client.deleteCheckpoint(name));
          this._all = this._all.filter(each => each.name !== name);
        } catch (error) {
          failed.set(name, (error as Error).message);
        }
        done++;
        noted();
      }
    });
    if (this.isWatched) {
      void this.refresh(); // the sizes of other checkpoints have changed
    }
    return failed;
  }

  dispose(): void {
    this.isWatched = false;
    this._isDisposed = true;
    this._model.changed.disconnect(this._onModel, this);
    Signal.clearData(this);
  }

  private async _ask(): Promise<void> {
    await this._patiently(
      () => null,
      async () => {
        while (this._isStale && !this._isDisposed) {
          this._isStale = false;
          try {
            this._all = await this._client.checkpoints();
            this._isReady = true;
            this._problem = '';
            this._arriving = arriving(this._model.sessions); // drops those that are now in the list
          } catch (error) {
            this._problem = (error as Error).message;
          }
        }
      }
    );
    this._asking = null;
    this._changed.emit();
  }

  /** Do work, and show its progress after half a second. */
  private async _patiently(
    share: () => number | null,
    work: (noted: () => void) => Promise<void>
  ): Promise<void> {
    let isLong = false;
    const show = () => {
      if (isLong) {
        this._working = { done: share() };
      }
      this._changed.emit();
    };
    const timer = setTimeout(() => {
      isLong = true;
      show();
    }, PROGRESS_DELAY_MS);
    try {
      await work(show);
    } finally {
      clearTimeout(timer);
      this._working = null;
    }
  }

  private _onModel(): void {
    const sessions = this._model.sessions;
    const now = mark(sessions);
    if (this.isWatched && now !== this._mark) {
      this._mark = now;
      void this.refresh();
    }
    const progress = JSON.stringify(sessions.map(each => each.progress).filter(Boolean));
    if (progress !== this._progress) {
      this._progress = progress;
      this._arriving = new Map([...this._arriving, ...arriving(sessions)]);
      this._changed.emit();
    }
  }

  private readonly _client: SingClient;
  private readonly _model: ISingModel;
  private readonly _changed = new Signal<this, void>(this);
  private readonly _ours = new Map<string, { verb: IDoing['verb']; isLong: boolean }>();
  private _all: readonly Checkpoint[] = [];
  private _isReady = false;
  private _problem = '';
  private _working: { done: number | null } | null = null;
  private _observing: IDisposable | null = null;
  private _asking: Promise<void> | null = null;
  private _isStale = false;
  private _isDisposed = false;
  private _arriving = new Map<string, IArriving>();
  private _mark = '';
  private _progress = '';
}

/** Return a value that changes when a checkpoint was made. */
function mark(sessions: readonly Session[]): string {
  const made = sessions.map(({ id, last_checkpoint: last, progress }) => [
    id,
    last && [last.name, last.created],
    progress?.verb === 'checkpoint' && progress.checkpoint
  ]);
  return JSON.stringify(made.sort());
}

function arriving(sessions: readonly Session[]): Map<string, IArriving> {
  return new Map(
    sessions.flatMap(({ name: session, progress }) =>
      progress?.verb === 'checkpoint'
        ? [[progress.checkpoint, { name: progress.checkpoint, session }]]
        : []
    )
  );
}
