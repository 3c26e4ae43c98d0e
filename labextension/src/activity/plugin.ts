import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import {
  ICommandPalette,
  IThemeManager,
  MainAreaWidget,
  WidgetTracker
} from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { activityIcon } from '../ui/icons';
import { CommandIDs, DOMAIN, ISing } from '../api/tokens';
import { showView } from '../ui/views';
import { ActivityPoller } from './data/activitypoller';
import { ActivityPanel, viewState } from './view/view';

const NAMESPACE = 'jupyter-sing-activity';
/** The layout is saved when the user has not zoomed for this time. */
const SAVE_MS = 500;

/** The main area view "GPU activity". */
export const activity: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:activity',
  description: 'Shows which sessions used which GPU in the last 24 hours.',
  autoStart: true,
  requires: [ISing],
  optional: [ITranslator, ICommandPalette, ILauncher, ILayoutRestorer, IThemeManager],
  activate: (
    app: JupyterFrontEnd,
    { client, model }: ISing,
    translation: ITranslator | null,
    palette: ICommandPalette | null,
    launcher: ILauncher | null,
    restorer: ILayoutRestorer | null,
    themes: IThemeManager | null
  ): void => {
    const { commands, shell } = app;
    const translator = translation ?? nullTranslator;
    const trans = translator.load(DOMAIN);
    const tracker = new WidgetTracker<MainAreaWidget<ActivityPanel>>({ namespace: NAMESPACE });

    const onOpen = (session: string): void => {
      if (model.get(session) && commands.hasCommand(CommandIDs.openNotebook)) {
        void commands.execute(CommandIDs.openNotebook, { session });
      }
    };
    const open = (state: object): MainAreaWidget<ActivityPanel> => {
      const poller = new ActivityPoller(client, model);
      const content = new ActivityPanel({
        poller,
        model,
        state: viewState(state),
        translator,
        themes,
        onOpen
      });
      const widget = new MainAreaWidget({ content });
      widget.id = NAMESPACE;
      widget.title.label = trans.__('GPU Activity');
      widget.title.caption = trans.__('GPU use in the last 24 hours');
      widget.title.icon = activityIcon;
      widget.title.closable = true;
      widget.toolbar.hide();
      let saving: number | undefined;
      content.stateChanged.connect(() => {
        window.clearTimeout(saving);
        saving = window.setTimeout(() => void tracker.save(widget), SAVE_MS);
      });
      widget.disposed.connect(() => window.clearTimeout(saving));
      return widget;
    };

    commands.addCommand(CommandIDs.openActivity, {
      label: trans.__('GPU Activity'),
      caption: trans.__('Show which sessions used which GPU in the last 24 hours'),
      icon: activityIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: args => {
        const widget = tracker.currentWidget ?? open(args);
        if (!widget.isAttached) {
          void tracker.add(widget);
        }
        showView(shell, widget, 'GPU Activity');
        return widget;
      }
    });
    palette?.addItem({ command: CommandIDs.openActivity, category: trans.__('GPU') });
    launcher?.add({ command: CommandIDs.openActivity, category: trans.__('Other'), rank: 5 });
    if (restorer) {
      void restorer.restore(tracker, {
        command: CommandIDs.openActivity,
        args: widget => ({ ...widget.content.state }),
        name: () => NAMESPACE
      });
    }
  }
};
