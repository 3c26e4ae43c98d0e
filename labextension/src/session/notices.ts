import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Notification } from '@jupyterlab/apputils';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { ISessionEvent } from '../api/stream';
import { CommandIDs, DOMAIN, ISing, type Session } from '../api/tokens';
import { isMine } from '../text/sessionactions';
import { readable, sessionName } from '../text/words';

/**
 * Beginning of the reason of a requested suspension, see `jupyter_sing/server/routes.py` and its
 * verbs.
 */
const ASKED_FOR = /^Suspended\b/;

/** Notifies users of events that they did not request. */
export const notices: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:notices',
  description: 'Notifies about kernels that died and sessions that were interrupted.',
  autoStart: true,
  requires: [ISing],
  optional: [ITranslator],
  activate: (app: JupyterFrontEnd, sing: ISing, translator: ITranslator | null): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    new Notices(app.commands, sing, trans).listen();
  }
};

/**
 * Notifies of three things: a kernel that died has a checkpoint, a session has failed, or a session
 * was suspended that was running or pinned.
 */
class Notices {
  constructor(
    private readonly _commands: CommandRegistry,
    private readonly _sing: ISing,
    private readonly _trans: TranslationBundle
  ) {}

  listen(): void {
    const { model } = this._sing;
    const remember = () => (this._known = new Map(model.sessions.map(each => [each.id, each])));
    remember();
    model.eventReceived.connect((_, event) => {
      const before = this._known.get(event.session);
      if (this._sing.settings.get('notifications')) {
        this._compare(event, before);
      }
      const now = model.get(event.session);
      // A session that has ended is remembered: the event that its kernel died may come after its
      // end.
      if (now) {
        this._known.set(now.id, now);
      }
    });
    model.changed.connect(() => {
      const died = this._known;
      remember();
      died.forEach((each, id) => this._known.has(id) || this._endedNames.set(id, each.name));
      // Keep only the sessions that ended last.
      [...this._endedNames.keys()].slice(0, -GONE_MAX).forEach(id => this._endedNames.delete(id));
    });
  }

  private _compare(event: ISessionEvent, before: Session | undefined): void {
    if (event.checkpoint && event.command) {
      this._kernelDied(event, before);
    } else if (before && isMine(before) && !event.ended && event.state !== before.state) {
      const now = { ...before, ...event, reason: event.reason ?? before.reason } as Session;
      if (event.state === 'failed') {
        this._notify(now, 'error');
      } else if (
        event.state === 'suspended' &&
        (bySomebodyElse(now) ||
          ((before.state === 'running' || before.pinned) && !ASKED_FOR.test(now.reason)))
      ) {
        this._notify(now, 'warning', CommandIDs.resume);
      }
    }
  }

  private _notify(session: Session, type: 'error' | 'warning', command?: string): void {
    const { _trans: trans } = this;
    const text = trans.__('%1: %2', sessionName(session, trans), readable(session.reason));
    const act = (id: string) => () => void this._commands.execute(id, { session: session.id });
    const open = { label: trans.__('Open Notebook'), callback: act(CommandIDs.openNotebook) };
    const resume = command && { label: trans.__('Resume'), callback: act(command) };
    Notification.emit(text, type, {
      autoClose: false,
      actions: resume ? [resume, open] : [open]
    });
  }

  private _kernelDied(event: ISessionEvent, before: Session | undefined): void {
    const { _trans: trans } = this;
    const checkpoint = event.checkpoint ?? '';
    const known = (before?.name ?? this._endedNames.get(event.session))?.split('/').pop();
    const text = known
      ? trans.__('The kernel of %1 died. Restore checkpoint %2 to continue.', known, checkpoint)
      : trans.__('A kernel died. Restore checkpoint %1 to continue.', checkpoint);
    Notification.warning(text, {
      autoClose: false,
      actions: [
        {
          label: trans.__('Restore'),
          caption: trans.__('Restore %1 after the kernel has restarted', checkpoint),
          displayType: 'accent',
          callback: () => this._restore(event.kernel_id, event.session, checkpoint)
        }
      ]
    });
  }

  /** Restore a checkpoint into the kernel that replaces one that died, as soon as it exists. */
  private _restore(kernel: string | undefined, died: string, name: string): void {
    const { model } = this._sing;
    const next = () => {
      const found = model.ofKernel(kernel);
      return found && found.id !== died ? found : undefined;
    };
    const restore = (session: Session) =>
      void this._commands.execute(CommandIDs.restore, { session: session.id, name });
    const there = next();
    if (there) {
      restore(there);
      return;
    }
    const waiting = Notification.emit(
      this._trans.__('Restart the kernel. %1 is restored after that.', name),
      'in-progress',
      { autoClose: false }
    );
    const restoreIfReady = () => {
      const session = next();
      if (session) {
        stop();
        Notification.dismiss(waiting);
        restore(session);
      }
    };
    // A user who hides the notification cancels the restore.
    const hidden = (_: unknown, change: Notification.IChange) => {
      if (change.type === 'removed' && change.notification.id === waiting) {
        stop();
      }
    };
    const stop = () => {
      model.changed.disconnect(restoreIfReady);
      Notification.manager.changed.disconnect(hidden);
    };
    model.changed.connect(restoreIfReady);
    Notification.manager.changed.connect(hidden);
  }

  private _known = new Map<string, Session>();
  private readonly _endedNames = new Map<string, string>();
}

/** True if another user than its owner has suspended a session. */
function bySomebodyElse(session: Session): boolean {
  return !!session.suspended_by && session.suspended_by !== session.owner;
}

/** Number of ended sessions whose names are remembered. */
const GONE_MAX = 50;
