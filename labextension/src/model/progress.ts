import { Notification } from '@jupyterlab/apputils';
import type { ISingModel, Session } from '../api/tokens';

/** Work that takes longer than this is shown while it is in progress. */
export const PROGRESS_DELAY_MS = 500;
/** Time for which a success is shown. */
const SUCCESS_MS = 5000;

/** Progress of a session's work, from 0 to 1; null if unknown. */
export function fraction(session: Session | undefined): number | null {
  const progress = session?.progress;
  return progress && progress.total > 0 ? Math.min(1, progress.done / progress.total) : null;
}

/**
 * Await work on a session, and show a notification with a progress bar if it takes longer than half
 * a second. If it ends earlier, only errors are shown.
 *
 * @param texts - Texts for the work in progress and for its result; empty: shown elsewhere.
 * @returns Its result, or undefined if it failed: the user has been notified then.
 */
export async function withProgress<T>(
  model: ISingModel,
  session: string,
  doing: Promise<T>,
  texts: { doing: string; done: (result: T) => string }
): Promise<T | undefined> {
  let shown: Shown | undefined;
  const timer = window.setTimeout(() => {
    shown = new Shown(texts.doing, () => fraction(model.get(session)));
  }, PROGRESS_DELAY_MS);
  try {
    const result = await doing;
    shown?.end(texts.done(result), { type: 'success', autoClose: SUCCESS_MS });
    return result;
  } catch (error) {
    const message = (error as Error).message;
    if (shown) {
      shown.end(message, { type: 'error', autoClose: false });
    } else {
      Notification.error(message, { autoClose: false });
    }
    return undefined;
  } finally {
    window.clearTimeout(timer);
  }
}

/**
 * A notification with a progress bar.
 *
 * Note [Bar]: JupyterLab shows progress at most in its list of notifications, never in those that
 * pop up, and updating a hidden notification makes it pop up again. So the text is written once,
 * and the bar is an element of ours inside the notification's element, which is found by its id;
 * the bar is added when that element exists.
 */
class Shown {
  constructor(message: string, done: () => number | null) {
    this._id = Notification.emit(message, 'in-progress', { autoClose: false });
    this._bar.className = 'jp-Sing-progress';
    this._bar.setAttribute('role', 'progressbar');
    this._bar.setAttribute('aria-label', message);
    this._bar.setAttribute('aria-valuemin', '0');
    this._bar.setAttribute('aria-valuemax', '100');
    this._bar.appendChild(document.createElement('div'));
    const draw = () => {
      this._frame = window.requestAnimationFrame(draw);
      this._draw(done());
    };
    draw();
  }

  /** Show the result; empty: nothing to show. */
  end(message: string, options: { type: 'success' | 'error'; autoClose: number | false }): void {
    window.cancelAnimationFrame(this._frame);
    this._bar.remove();
    if (message) {
      Notification.update({ id: this._id, message, ...options });
    } else {
      Notification.dismiss(this._id);
    }
  }

  private _draw(fraction: number | null): void {
    if (!this._bar.isConnected) {
      document.getElementById(this._id)?.appendChild(this._bar);
    }
    const percent = fraction === null ? '' : String(Math.round(100 * fraction));
    if (percent === this._percent) {
      return;
    }
    this._percent = percent;
    if (percent) {
      this._bar.setAttribute('aria-valuenow', percent);
    } else {
      this._bar.removeAttribute('aria-valuenow');
    }
    this._bar.style.setProperty('--jp-sing-done', `${percent || 0}%`);
    this._bar.classList.toggle('jp-mod-unknown', !percent);
  }

  private readonly _id: string;
  private readonly _bar = document.createElement('div');
  private _frame = 0;
  private _percent: string | undefined;
}
