import type { ISessionContext } from '@jupyterlab/apputils';
import { Signal } from '@lumino/signaling';

/** The context of a notebook whose kernel is what a test says. */
export class FakeContext {
  readonly kernelChanged = new Signal<this, void>(this);
  readonly statusChanged = new Signal<this, void>(this);
  readonly connectionStatusChanged = new Signal<this, string>(this);
  session: { kernel: { id: string; status: string } } | null = null;

  /** Have a kernel. */
  start(id: string, status = 'idle'): void {
    this.session = { kernel: { id, status } };
    this.kernelChanged.emit();
  }

  /** Have none. */
  stop(): void {
    this.session = null;
    this.kernelChanged.emit();
  }

  /** As the interface that it has a part of. */
  get asContext(): ISessionContext {
    return this as unknown as ISessionContext;
  }
}
