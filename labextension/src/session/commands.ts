import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import {
  ICommandPalette,
  type ISessionContext,
  Notification,
  showErrorMessage
} from '@jupyterlab/apputils';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { type LabIcon, refreshIcon } from '@jupyterlab/ui-components';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import { askForDevice, askForName, mayBeSuspended } from './dialogs';
import { checkpointIcon, pinIcon, stateIcons } from '../ui/icons';
import { kernelIdOf } from '../model/kernels';
import { withProgress } from '../model/progress';
import { CommandIDs, DOMAIN, ISing, type Session } from '../api/tokens';
import { isMine, movedText, obstacle, type Verb } from '../text/sessionactions';
import { bytesText } from '../text/format';
import { deviceName, sessionName, stateSentence } from '../text/words';

/** CSS class of elements with a context menu for a session; `data-context` is its id. */
export const SESSION_CLASS = 'jp-Sing-session';

/** Restores into the session on which a context menu was opened. */
const RESTORE_HERE = 'jupyter_sing:restore-here';

const PALETTE = [
  CommandIDs.suspend,
  CommandIDs.resume,
  CommandIDs.migrate,
  CommandIDs.checkpoint,
  CommandIDs.pin,
  CommandIDs.refresh
];

/** Makes actions on sessions available to menus, the palette and other parts. */
export const commands: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:commands',
  description: 'Adds commands to suspend, resume, migrate, pin and save GPU sessions.',
  autoStart: true,
  requires: [ISing],
  optional: [ITranslator, ICommandPalette],
  activate: (
    app: JupyterFrontEnd,
    sing: ISing,
    translator: ITranslator | null,
    palette: ICommandPalette | null
  ): void => {
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const added = new Commands(app, sing, trans);
    added.register();
    const category = trans.__('GPU');
    PALETTE.forEach(command => palette?.addItem({ command, category, args: { isPalette: true } }));
  }
};

/**
 * The commands for sessions.
 *
 * They take the session from the argument `session`, from the element on which a context menu was
 * opened (`isContextMenu`), or else from the notebook or console in front.
 */
class Commands {
  constructor(
    private readonly _app: JupyterFrontEnd,
    private readonly _sing: ISing,
    private readonly _trans: TranslationBundle
  ) {}

  register(): void {
    const { _sing: sing, _trans: trans } = this;
    this._add(CommandIDs.suspend, 'suspend', {
      label: [trans.__('Suspend'), trans.__('Suspend Session')],
      caption: trans.__('Free the GPU and keep the state; nothing is lost'),
      icon: stateIcons.suspended,
      execute: session => this._suspend(session)
    });
    this._add(CommandIDs.resume, 'resume', {
      label: [trans.__('Resume'), trans.__('Resume Session')],
      caption: trans.__('Move the state back to the GPU now'),
      icon: stateIcons.running,
      execute: session => this._resume(session)
    });
    this._add(CommandIDs.migrate, 'migrate', {
      label: [trans.__('Migrate…'), trans.__('Migrate Session to Another GPU…')],
      caption: trans.__('Move the session to another GPU while its cells keep running'),
      icon: stateIcons.migrating,
      obstacle: () => (sing.model.devices.length < 2 ? trans.__('There is no other GPU.') : ''),
      execute: (session, args) => this._migrate(session, args['device'])
    });
    this._add(CommandIDs.checkpoint, 'checkpoint', {
      label: [trans.__('Save Checkpoint…'), trans.__('Save Checkpoint of Session…')],
      caption: trans.__('Save the notebook to disk: its variables and its GPU memory'),
      icon: checkpointIcon,
      obstacle: session => (session.kernel_id ? '' : trans.__('Only notebooks have checkpoints.')),
      execute: session => this._checkpoint(session)
    });
    this._add(CommandIDs.pin, 'pin', {
      label: [trans.__('Keep on GPU'), trans.__('Keep Session on GPU')],
      caption: trans.__('Keep the memory of the session on its GPU, even when it is idle'),
      icon: pinIcon,
      isToggled: session => session?.pinned ?? false,
      execute: session => this._pin(session)
    });
    this._app.commands.addCommand(CommandIDs.openNotebook, {
      label: trans.__('Open Notebook'),
      caption: trans.__('Open the notebook of the session'),
      isEnabled: args => {
        const session = this._session(args);
        return !!session && (!isMine(session) || kernelIdOf(sing.model, session) !== '');
      },
      execute: args => this._open(this._session(args)),
      describedBy: { args: SESSION_SCHEMA }
    });
    // The command itself belongs to the checkpoints plugin, which does not know this menu.
    this._app.commands.addCommand(RESTORE_HERE, {
      label: trans.__('Restore Checkpoint…'),
      caption: trans.__('Replace the variables of this notebook with those of a checkpoint'),
      icon: checkpointIcon,
      isEnabled: args => {
        const session = this._session(args);
        const { commands } = this._app;
        return (
          !!session?.kernel_id && commands.isEnabled(CommandIDs.restore, { session: session.id })
        );
      },
      isVisible: () => this._app.commands.hasCommand(CommandIDs.restore),
      execute: args =>
        this._app.commands.execute(CommandIDs.restore, { session: this._session(args)?.id ?? '' }),
      describedBy: { args: SESSION_SCHEMA }
    });
    this._app.commands.addCommand(CommandIDs.refresh, {
      label: args => (args['isPalette'] ? trans.__('Refresh GPU Sessions') : trans.__('Refresh')),
      caption: trans.__('Request the current state of GPUs and sessions'),
      icon: args => (args['isPalette'] ? undefined : refreshIcon),
      execute: () => sing.model.refresh(),
      describedBy: { args: { type: 'object', properties: {} } }
    });
    this._follow();
  }

  /** Add a command for a session. */
  private _add(id: string, verb: Verb, options: ISessionCommand): void {
    const { _trans: trans } = this;
    const why = (args: Args): string => {
      const session = this._session(args);
      return obstacle(verb, session, trans) || (session && options.obstacle?.(session)) || '';
    };
    const isToggled = options.isToggled;
    this._app.commands.addCommand(id, {
      label: args => options.label[args['isPalette'] ? 1 : 0],
      caption: args => why(args) || options.caption,
      icon: args => (args['isPalette'] || isToggled ? undefined : options.icon),
      isEnabled: args => !why(args),
      isVisible: args => {
        const session = args['isContextMenu'] ? this._session(args) : undefined;
        return session === undefined || isMine(session);
      },
      isToggleable: isToggled !== undefined,
      isToggled: isToggled && (args => isToggled(this._session(args))),
      execute: async args => {
        const session = this._session(args);
        const problem = why(args);
        if (session === undefined || problem) {
          Notification.info(problem);
          return undefined;
        }
        return options.execute(session, args);
      },
      describedBy: { args: SESSION_SCHEMA }
    });
  }

  /** Return the session for a command. */
  private _session(args: Args): Session | undefined {
    const { model } = this._sing;
    if (typeof args['session'] === 'string') {
      return model.get(args['session']);
    }
    if (args['isContextMenu']) {
      const node = this._app.contextMenuHitTest(each => each.classList.contains(SESSION_CLASS));
      return model.get(node?.dataset['context'] ?? '');
    }
    return model.ofKernel(kernelOf(this._app.shell.currentWidget));
  }

  private async _suspend(session: Session): Promise<Session | undefined> {
    const { _sing: sing, _trans: trans } = this;
    if (!(await mayBeSuspended(sing, session, trans))) {
      return undefined;
    }
    return this._do(session, sing.client.suspend(session.id), {
      doing: trans.__('Suspending %1…', sessionName(session, trans)),
      done: () => trans.__('%1 is suspended.', sessionName(session, trans))
    });
  }

  private _resume(session: Session): Promise<Session | undefined> {
    const { _trans: trans } = this;
    return this._do(session, this._sing.client.resume(session.id), {
      doing: trans.__('Resuming %1…', sessionName(session, trans)),
      done: () => trans.__('%1 has resumed.', sessionName(session, trans))
    });
  }

  private async _migrate(session: Session, device: unknown): Promise<Session | undefined> {
    const { _sing: sing, _trans: trans } = this;
    const target =
      typeof device === 'string' ? device : await askForDevice(sing.model, session, trans);
    if (target === null) {
      return undefined;
    }
    const name = sessionName(session, trans);
    return this._do(session, sing.client.migrate(session.id, target), {
      doing: trans.__('Migrating %1 to %2…', name, deviceName(target)),
      done: moved => movedText(moved, name, trans)
    });
  }

  private _pin(session: Session): Promise<Session | undefined> {
    const { _trans: trans } = this;
    const pinned = !session.pinned;
    const name = sessionName(session, trans);
    return this._do(session, this._sing.client.pin(session.id, pinned), {
      doing: pinned ? trans.__('Pinning %1…', name) : trans.__('Unpinning %1…', name),
      done: () =>
        pinned
          ? trans.__('%1 is pinned: its memory stays on its GPU.', name)
          : trans.__('%1 is no longer pinned: it is suspended when others need the GPU.', name)
    });
  }

  private async _checkpoint(session: Session): Promise<string | undefined> {
    const { _sing: sing, _trans: trans } = this;
    const wanted = await askForName(session, trans);
    if (wanted === null) {
      return undefined;
    }
    const name = sessionName(session, trans);
    const made = await withProgress(
      sing.model,
      session.id,
      sing.client.checkpoint(session.id, wanted),
      {
        doing: trans.__('Saving a checkpoint of %1…', name),
        done: ({ name: saved, stored }) =>
          trans.__('Saved %1 as checkpoint %2 (%3).', name, saved, bytesText(stored ?? 0))
      }
    );
    return made?.name;
  }

  /** Await an action on a session, and update the model with its result. */
  private async _do(
    { id }: Session,
    doing: Promise<Session>,
    texts: { doing: string; done: (result: Session) => string }
  ): Promise<Session | undefined> {
    const { model } = this._sing;
    const result = await withProgress(model, id, doing, texts);
    if (result) {
      model.update(result);
    }
    return result;
  }

  /** Show the notebook or console of a session. */
  private async _open(session: Session | undefined): Promise<void> {
    const { _app: app, _trans: trans } = this;
    if (session === undefined) {
      return;
    }
    const kernel = isMine(session) ? kernelIdOf(this._sing.model, session) : '';
    if (isMine(session) && !kernel) {
      Notification.info(
        trans.__('%1 was not started from a notebook.', sessionName(session, trans))
      );
      return;
    }
    for (const widget of kernel ? app.shell.widgets('main') : []) {
      if (kernelOf(widget) === kernel) {
        app.shell.activateById(widget.id);
        return;
      }
    }
    const served = [...app.serviceManager.sessions.running()].find(
      each => kernel && each.kernel?.id === kernel
    );
    if (served === undefined) {
      Notification.info(
        isMine(session)
          ? trans.__('The notebook %1 was not found on this server.', sessionName(session, trans))
          : stateSentence(session, trans)
      );
      return;
    }
    const opener = served.type === 'console' ? 'console:open' : 'docmanager:open';
    try {
      await app.commands.execute(opener, { path: served.path, activate: true });
    } catch (error) {
      await showErrorMessage(trans.__('The notebook cannot be opened'), error as Error);
    }
  }

  /** Notify menus and other users of the commands when these may have changed. */
  private _follow(): void {
    const { _app: app } = this;
    const { model } = this._sing;
    let before = '';
    const notifyIfChanged = () => {
      const about = model.sessions.map(each =>
        [each.id, each.state, each.pinned, each.device, each.progress?.verb, each.kernel_id].join()
      );
      const current = model.ofKernel(kernelOf(app.shell.currentWidget))?.id;
      const now = [current, model.devices.length, ...about].join(' ');
      if (now !== before) {
        before = now;
        SESSION_COMMANDS.filter(id => app.commands.hasCommand(id)).forEach(id =>
          app.commands.notifyCommandChanged(id)
        );
      }
    };
    model.changed.connect(notifyIfChanged);
    app.shell.currentChanged?.connect(notifyIfChanged);
  }
}

type Args = ReadonlyPartialJSONObject;

interface ISessionCommand {
  /** For menus, and for the palette, where it has to name its object. */
  label: [string, string];
  caption: string;
  icon: LabIcon;
  /** Why it is not possible now, in addition to `obstacle`. */
  obstacle?: (session: Session) => string;
  isToggled?: (session: Session | undefined) => boolean;
  execute: (session: Session, args: Args) => Promise<unknown>;
}

const SESSION_SCHEMA = {
  type: 'object',
  properties: {
    session: {
      type: 'string',
      description: 'Id of a session; default: the session of the current notebook'
    },
    device: {
      type: 'string',
      description: 'Id of the target GPU, such as cuda:1; default: ask the user'
    }
  }
} as const;

const SESSION_COMMANDS = [
  CommandIDs.suspend,
  CommandIDs.resume,
  CommandIDs.migrate,
  CommandIDs.checkpoint,
  CommandIDs.restore,
  CommandIDs.pin,
  CommandIDs.openNotebook,
  CommandIDs.showState
];

/** The kernel of a notebook or console. */
function kernelOf(widget: object | null): string | undefined {
  const context = (widget as { sessionContext?: ISessionContext } | null)?.sessionContext;
  return context?.session?.kernel?.id;
}
