import type { ISessionContext } from '@jupyterlab/apputils';
import { Signal } from '@lumino/signaling';

/** The context of a notebook, with a kernel that the test sets. */
export class FakeContext {
  readonly kernelChanged = new Signal<this, void>(this);
  readonly statusChanged = new Signal<this, void>(this);
  readonly connectionStatusChanged = new Signal<this, string>(this);
  session: { kernel: { id: string; status: string } } | null = null;

  /** Set a kernel. */
  start(id: string, status = 'idle'): void {
    this.session = { kernel: { id, status } };
    this.kernelChanged.emit();
  }

  /** Remove the kernel. */
  stop(): void {
    this.session = null;
    this.kernelChanged.emit();
  }

  /** This object as the interface that it implements in part. */
  get asContext(): ISessionContext {
    return this as unknown as ISessionContext;
  }
}
