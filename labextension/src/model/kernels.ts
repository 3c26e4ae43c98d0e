import type { ISessionContext } from '@jupyterlab/apputils';
import type { Widget } from '@lumino/widgets';
import type { ISingModel, Session } from '../api/tokens';

/** Return the session context of a notebook, a console or another widget that has one. */
export function contextOf(widget: Widget | null): ISessionContext | undefined {
  return (widget as { sessionContext?: ISessionContext } | null)?.sessionContext;
}

/** Return the device session of the kernel of a notebook or console. */
export function sessionOf(
  model: ISingModel,
  context: ISessionContext | undefined
): Session | undefined {
  return model.ofKernel(context?.session?.kernel?.id);
}

/** Return the id of the kernel from which a session's process was started; empty if there is none. */
export function kernelIdOf(model: ISingModel, session: Session): string {
  const above = session.kernel_id ? undefined : model.get(session.parent);
  return above ? kernelIdOf(model, above) : session.kernel_id;
}

/**
 * True if the state of a notebook's or console's kernel is not known: there is no kernel, or its
 * session is about to begin or to end.
 */
export function isUnknown(model: ISingModel, context: ISessionContext): boolean {
  const kernel = context.session?.kernel;
  if (!kernel || !model.isReady) {
    return true;
  }
  return model.ofKernel(kernel.id) === undefined && PASSING.has(kernel.status);
}

const PASSING = new Set([
  'unknown',
  'starting',
  'restarting',
  'autorestarting',
  'terminating',
  'dead'
]);
