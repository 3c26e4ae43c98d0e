import { Notification } from '@jupyterlab/apputils';
import type { ISingModel, Session } from './tokens';

/** What takes longer than this is shown while it goes on. */
export const PATIENCE_MS = 500;

/** How much of what is being done is done, from 0 to 1; null if nobody knows. */
export function fraction(session: Session | undefined): number | null {
  const progress = session?.progress;
  return progress && progress.total > 0 ? Math.min(1, progress.done / progress.total) : null;
}

/**
 * Await something that is done to a session, and show a notification with a progress bar if that
 * takes longer than half a second. Of what is done before, nothing is shown but errors.
 *
 * @param texts - What is being done, and what is said of the result.
 * @returns Its result, or undefined if it failed: people have been told then.
 */
export async function withProgress<T>(
  model: ISingModel,
  session: string,
  doing: Promise<T>,
  texts: { doing: string; done: (result: T) => string }
): Promise<T | undefined> {
  let notification: string | undefined;
  const show = () => {
    const progress = fraction(model.get(session));
    const options = { autoClose: false as const, ...(progress === null ? {} : { progress }) };
    if (notification === undefined) {
      notification = Notification.emit(texts.doing, 'in-progress', options);
    } else {
      Notification.update({ id: notification, message: texts.doing, ...options });
    }
  };
  const timer = window.setTimeout(() => {
    show();
    model.changed.connect(show);
  }, PATIENCE_MS);
  try {
    const result = await doing;
    if (notification !== undefined) {
      Notification.update({
        id: notification,
        message: texts.done(result),
        type: 'success',
        progress: null as unknown as undefined,
        autoClose: 5000
      });
    }
    return result;
  } catch (error) {
    const message = (error as Error).message;
    if (notification === undefined) {
      Notification.error(message, { autoClose: false });
    } else {
      Notification.update({ id: notification, message, type: 'error', autoClose: false });
    }
    return undefined;
  } finally {
    window.clearTimeout(timer);
    model.changed.disconnect(show);
  }
}
