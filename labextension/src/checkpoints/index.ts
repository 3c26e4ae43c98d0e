import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette, WidgetTracker } from '@jupyterlab/apputils';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { checkpointIcon, stateIcons } from '../ui/icons';
import { withProgress } from '../model/progress';
import { CommandIDs, DOMAIN, ISing } from '../api/tokens';
import { showView } from '../ui/views';
import { CheckpointActions } from './actions';
import { chooseCheckpoint } from './view/dialogs';
import type { INotebook } from './list';
import { Notebooks } from './notebooks';
import { CheckpointStore } from './store';
import type { IView } from './view/view';
import { CheckpointsWidget } from './view/widget';

/** Shows checkpoints, restores and deletes them. */
export const checkpoints: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:checkpoints',
  description: 'Lists checkpoints, restores and deletes them.',
  autoStart: true,
  requires: [ISing],
  optional: [INotebookTracker, ICommandPalette, ILayoutRestorer, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    sing: ISing,
    tracker: INotebookTracker | null,
    palette: ICommandPalette | null,
    restorer: ILayoutRestorer | null,
    translator: ITranslator | null
  ): void => {
    const { commands } = app;
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const { client, model } = sing;
    const store = new CheckpointStore(client, model);
    const open = (path: string, kernel: string | null): Promise<NotebookPanel> =>
      commands.execute('docmanager:open', {
        path,
        factory: 'Notebook',
        ...(kernel === null ? {} : { kernel: { name: kernel } })
      });
    const notebooks = new Notebooks(tracker, app.serviceManager, open, trans);
    const actions = new CheckpointActions(sing, store, notebooks, trans);
    const opened = new WidgetTracker<CheckpointsWidget>({ namespace: 'jupyter-sing-checkpoints' });

    const view: IView = {
      store,
      actions,
      notebooks,
      openNotebook: path => void commands.execute('docmanager:open', { path }).catch(() => null),
      get make() {
        const session = model.ofKernel(notebooks.current?.kernelId)?.id;
        return session && commands.hasCommand(CommandIDs.checkpoint)
          ? () => void commands.execute(CommandIDs.checkpoint, { session }).catch(() => null)
          : null;
      },
      trans
    };
    commands.addCommand(CommandIDs.openCheckpoints, {
      label: args => (args.isPalette ? trans.__('Show Checkpoints') : trans.__('Checkpoints')),
      caption: trans.__('Show, restore and delete saved notebooks'),
      icon: args => (args.isPalette ? undefined : checkpointIcon),
      describedBy: { args: { type: 'object', properties: { isPalette: { type: 'boolean' } } } },
      execute: () => {
        const widget = opened.currentWidget ?? new CheckpointsWidget(view);
        if (!opened.has(widget)) {
          void opened.add(widget);
        }
        showView(app.shell, widget, 'Checkpoints');
        return widget;
      }
    });

    /** The notebook for a command: of a session, or the current one. */
    const notebookOf = (session: unknown): INotebook | null => {
      const found = typeof session === 'string' ? model.get(session) : undefined;
      return found ? { path: found.name, kernelId: found.kernel_id } : notebooks.current;
    };
    commands.addCommand(CommandIDs.restore, {
      label: trans.__('Restore Checkpoint…'),
      icon: args => (args.isPalette ? undefined : stateIcons.restoring),
      caption: trans.__('Replace the variables of a notebook with those of a checkpoint'),
      describedBy: {
        args: {
          type: 'object',
          properties: {
            session: {
              type: 'string',
              description: 'Id of a session; default: the session of the current notebook'
            },
            name: { type: 'string', description: 'Name of the checkpoint; default: ask the user' }
          }
        }
      },
      isEnabled: ({ session }) => notebookOf(session)?.kernelId != null,
      execute: async ({ session, name }) => {
        const notebook = notebookOf(session);
        const found = await withProgress(model, '', client.checkpoints(), {
          doing: trans.__('Loading checkpoints'),
          done: () => ''
        });
        if (notebook === null || found === undefined) {
          return;
        }
        const named = found.find(each => each.name === name);
        if (named) {
          await actions.restore(named, notebook);
        } else {
          const chosen = await chooseCheckpoint(found, notebook, trans);
          await (chosen && actions.restoreNow(chosen, notebook));
        }
      }
    });
    commands.commandChanged.connect((_, { id, type }) => {
      if (id === CommandIDs.checkpoint && type === 'added') {
        opened.forEach(each => each.content.update());
      }
    });
    tracker?.currentChanged.connect(() => commands.notifyCommandChanged(CommandIDs.restore));

    const category = trans.__('GPU');
    for (const command of [CommandIDs.openCheckpoints, CommandIDs.restore]) {
      palette?.addItem({ command, category, args: { isPalette: true } });
    }
    void restorer?.restore(opened, {
      command: CommandIDs.openCheckpoints,
      name: () => 'checkpoints'
    });
  }
};
