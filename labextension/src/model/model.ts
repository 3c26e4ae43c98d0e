import type { Event } from '@jupyterlab/services';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import { Poll } from '@lumino/polling';
import { type ISignal, Signal } from '@lumino/signaling';
import { type SingClient, SingError } from '../api/client';
import { type ISessionEvent, sessionEvent } from '../api/stream';
import type { Device, ISingModel, Session } from '../api/tokens';

/** Changes within this time are emitted together: about a frame. */
const FRAME_MS = 16;
/** Longest pause before a failed request is retried. */
const BACKOFF_MS_MAX = 60_000;

/**
 * The state of devices and sessions, see `ISingModel`.
 *
 * Note [Requests]: events report every change, but not whether some were missed. So the server's
 * status is requested at the start, whenever `invalidate` is called (a connection was interrupted,
 * the page was hidden), and every `interval` as long as there are observers. A poll does that: it runs
 * while a request is pending or there are observers, stands by while the page is hidden, and is
 * stopped otherwise.
 */
export class SingModel implements ISingModel, IDisposable {
  constructor(options: SingModel.IOptions) {
    this._client = options.client;
    this._interval = options.interval ?? 10_000;
    this._events = options.events;
    this._poll = new Poll({
      auto: false,
      factory: () => this._request(),
      frequency: this._frequency,
      name: 'jupyter_sing:status',
      standby: 'when-hidden'
    });
    this._events.stream.connect(this._onEvent, this);
    this.invalidate();
  }

  get devices(): readonly Device[] {
    if (this._devicesAreOld) {
      this._devicesAreOld = false;
      this._devices = this._devices.map(device => occupied(device, this._sessions));
    }
    return this._devices;
  }

  get sessions(): readonly Session[] {
    return this._sessions;
  }

  get isReady(): boolean {
    return this._isReady;
  }

  get problem(): string {
    return this._problem;
  }

  get isUnreachable(): boolean {
    return this._isUnreachable;
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted for each event of the server about a session, after the model was updated. */
  get eventReceived(): ISignal<this, ISessionEvent> {
    return this._eventReceived;
  }

  get isDisposed(): boolean {
    return this._poll.isDisposed;
  }

  /** Milliseconds between two requests while there are observers. */
  set interval(milliseconds: number) {
    this._interval = milliseconds;
    this._poll.frequency = this._frequency;
  }

  ofKernel(kernelId: string | null | undefined): Session | undefined {
    const found = kernelId ? this._sessions.filter(each => each.kernel_id === kernelId) : [];
    return found.find(each => each.state !== 'failed') ?? found[0];
  }

  get(id: string): Session | undefined {
    return this._sessions.find(each => each.id === id);
  }

  async refresh(): Promise<void> {
    await this._poll.refresh();
    await this._poll.tick;
  }

  /** Request the status soon, as events may have been missed. */
  invalidate(): void {
    this._isRequestDue = true;
    void this._poll.refresh();
  }

  observe(): IDisposable {
    if (++this._observers === 1) {
      void this._poll.refresh();
    }
    return new DisposableDelegate(() => {
      this._observers--;
      this._stopIfIdle();
    });
  }

  update(session: Session): void {
    this._replace(session.id, session);
    this._emitChanged();
  }

  dispose(): void {
    this._poll.dispose();
    window.clearTimeout(this._frame);
    Signal.clearData(this);
  }

  /** Request the status, and stop the poll if no more is needed (Note [Requests]). */
  private async _request(): Promise<void> {
    this._isRequestDue = false;
    const meanwhile: ISessionEvent[] = (this._meanwhile = []);
    try {
      const { devices, sessions } = await this._client.status();
      this._devices = devices;
      this._sessions = sessions;
      // They may be newer than the answer; if they are not, applying them again is idempotent.
      meanwhile.forEach(event => this._apply(event));
      this._isReady = true;
      this._problem = '';
      this._isUnreachable = false;
    } catch (error) {
      this._isRequestDue = true;
      this._problem = (error as Error).message;
      this._isUnreachable = error instanceof SingError && error.reason === 'unreachable';
      throw error; // the poll backs off
    } finally {
      this._meanwhile = null;
      this._emitChanged();
    }
    this._stopIfIdle();
  }

  private _stopIfIdle(): void {
    if (!this._isRequestDue && this._observers === 0 && !this.isDisposed) {
      void this._poll.stop();
    }
  }

  private _onEvent(_: unknown, emission: Event.Emission): void {
    const event = sessionEvent(emission);
    if (event === null) {
      return;
    }
    this._meanwhile?.push(event);
    this._apply(event);
    this._emitChanged();
    this._eventReceived.emit(event);
  }

  private _apply(event: ISessionEvent): void {
    const { session: id, ended, checkpoint, command, ...changes } = event;
    if (ended) {
      this._sessions = this._sessions.filter(each => each.id !== id);
      this.invalidate(); // its kernel may still run without it, which only the server knows
    } else if (this.get(id)) {
      this._replace(id, { progress: null, ...changes, device: changes.device || null });
    } else if (changes.state !== 'failed') {
      this.invalidate(); // a new session, of which the event contains only a part
    }
    this._devicesAreOld = true;
  }

  private _replace(id: string, changes: Partial<Session>): void {
    const before = this.get(id);
    this._sessions = before
      ? this._sessions.map(each => (each === before ? { ...each, ...changes } : each))
      : [...this._sessions, changes as Session];
    this._devicesAreOld = true;
  }

  private _emitChanged(): void {
    this._frame ??= window.setTimeout(() => {
      this._frame = undefined;
      this._changed.emit();
    }, FRAME_MS);
  }

  private get _frequency() {
    const interval = this._interval;
    return { backoff: true, interval, max: Math.max(interval, BACKOFF_MS_MAX) };
  }

  private readonly _client: SingClient;
  private readonly _events: Event.IManager;
  private readonly _poll: Poll;
  private readonly _changed = new Signal<this, void>(this);
  private readonly _eventReceived = new Signal<this, ISessionEvent>(this);
  private _devices: readonly Device[] = [];
  private _sessions: readonly Session[] = [];
  private _isReady = false;
  private _problem = '';
  private _isUnreachable = false;
  private _interval: number;
  private _observers = 0;
  private _isRequestDue = false;
  private _meanwhile: ISessionEvent[] | null = null; // events received while an answer is awaited
  private _devicesAreOld = false;
  private _frame: number | undefined;
}

/** Return a device with its memory use and sessions, computed from the sessions. */
function occupied(device: Device, sessions: readonly Session[]): Device {
  const here = sessions.filter(each => each.device === device.id);
  const used = here.reduce((sum, each) => sum + each.memory, 0);
  return { ...device, memory_used: used, sessions: here.map(each => each.id) };
}

export namespace SingModel {
  export interface IOptions {
    client: SingClient;
    events: Event.IManager;
    /** Milliseconds between two requests while there are observers; default: 10,000. */
    interval?: number;
  }
}
