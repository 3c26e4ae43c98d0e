import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import { Signal } from '@lumino/signaling';
import type { ISessionEvent } from '../api/stream';
import type { Device, ISingModel, Session } from '../api/tokens';

/** A model with a test's data, which emits changes at once. */
export class FakeModel implements ISingModel {
  readonly changed = new Signal<this, void>(this);
  readonly eventReceived = new Signal<this, ISessionEvent>(this);
  isReady = true;
  problem = '';
  isUnreachable = false;
  /** Number of observers. */
  observers = 0;
  /** Number of refresh requests. */
  refreshes = 0;

  constructor(
    public devices: readonly Device[] = [],
    public sessions: readonly Session[] = []
  ) {}

  ofKernel(kernelId: string | null | undefined): Session | undefined {
    return kernelId ? this.sessions.find(each => each.kernel_id === kernelId) : undefined;
  }

  get(id: string): Session | undefined {
    return this.sessions.find(each => each.id === id);
  }

  async refresh(): Promise<void> {
    this.refreshes++;
  }

  update(session: Session): void {
    this.put(session);
  }

  /** Add a session, or replace the one with its id. */
  put(session: Session): void {
    const others = this.sessions.filter(each => each.id !== session.id);
    this.sessions = [...others, session];
    this.changed.emit();
  }

  observe(): IDisposable {
    this.observers++;
    return new DisposableDelegate(() => this.observers--);
  }
}
