import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import {
  type IRunningSessions,
  IRunningSessionManagers,
  IRunningSessionSidebar
} from '@jupyterlab/running';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { CommandToolbarButton, type PanelWithToolbar, SidePanel } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { IDisposable } from '@lumino/disposable';
import { MessageLoop } from '@lumino/messaging';
import type { Widget } from '@lumino/widgets';
import React from 'react';
import { SESSION_CLASS } from '../session/commands';
import { activityIcon } from '../ui/icons';
import { DeviceLabel, JobLabel, NoteLabel, OutsideLabel, SessionLabel } from './rowlabels';
import { flat, type IEntry, Rows } from './rows';
import { CommandIDs, DOMAIN, ISing, type ISingModel } from '../api/tokens';
import { obstacle } from '../text/sessionactions';

/**
 * The view that is opened from the section's toolbar; more buttons would leave no room for its
 * name.
 */
const VIEW = { id: CommandIDs.openActivity, icon: activityIcon, label: '' };

/** Adds the section "GPUs" to the panel of running items. */
export const running: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:running',
  description: 'Lists GPUs and the sessions on them in the Running panel.',
  autoStart: true,
  requires: [ISing],
  optional: [IRunningSessionManagers, IRunningSessionSidebar, ITranslator],
  activate: async (
    app: JupyterFrontEnd,
    sing: ISing,
    managers: IRunningSessionManagers | null,
    sidebar: IRunningSessionSidebar | null,
    translator: ITranslator | null
  ): Promise<void> => {
    await sing.settings.ready;
    if (managers === null || !sing.settings.get('showPanel')) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const manager = new RunningDevices(app.commands, sing.model, trans);
    managers.add(manager);
    // The button of a command that another plugin has added later is hidden until this
    // notification.
    void app.restored.then(
      () => app.commands.hasCommand(VIEW.id) && app.commands.notifyCommandChanged(VIEW.id)
    );
    if (sidebar instanceof SidePanel) {
      const section = sidebar.widgets.find(each => each.title.label === manager.name);
      if (section) {
        section.addClass('jp-Sing-runningSection');
        (section as PanelWithToolbar).toolbar.addClass('jp-Sing-runningToolbar');
        whileVisible(section, () => sing.model.observe());
      }
    }
  }
};

/** Devices, and the sessions on them, as the panel lists them. */
export class RunningDevices implements IRunningSessions.IManager {
  readonly name: string;
  readonly shutdownAllLabel: string;
  readonly supportsMultipleViews = true;
  readonly toolbarButtons: CommandToolbarButton[];

  constructor(
    private readonly _commands: CommandRegistry,
    private readonly _model: ISingModel,
    private readonly _trans: TranslationBundle
  ) {
    this.name = _trans.__('GPUs');
    this.shutdownAllLabel = _trans.__('Suspend Idle');
    this._rows = new Rows(_model, _trans);
    this.toolbarButtons = [new CommandToolbarButton({ commands: _commands, ...VIEW })];
  }

  get runningChanged(): Rows['moved'] {
    return this._rows.moved;
  }

  running({ mode }: { mode: 'tree' | 'list' }): IRunningSessions.IRunningItem[] {
    const { groups, note } = this._rows;
    const items = groups.flatMap(group => {
      const uses = [
        ...(mode === 'tree'
          ? [
              ...group.sessions.map(each => this._entry(each)),
              ...group.parts.map(each => this._job(each))
            ]
          : flat(group.sessions)
              .filter(each => !each.isJob)
              .map(each => this._session(each, mode))),
        ...group.outside.map(each => this._outside(each))
      ];
      return mode === 'list' || group.device === null ? uses : [this._device(group.device, uses)];
    });
    if (!note) {
      return items;
    }
    // Below the devices, so that they do not move; but a problem must be visible.
    return this._model.problem ? [this._note(), ...items] : [...items, this._note()];
  }

  refreshRunning(): void {
    void this._model.refresh();
  }

  shutdownAllConfirmationText = (): string => {
    const count = this._idle().length;
    return count === 0
      ? this._trans.__('You have no idle session.')
      : this._trans._n(
          'Suspend one idle session? Nothing is lost: it resumes when you run a cell.',
          'Suspend %1 idle sessions? Nothing is lost: they resume when you run a cell.',
          count
        );
  };

  /** Suspends idle sessions: nothing is shut down here. */
  shutdownAll(): void {
    for (const session of this._idle()) {
      void this._commands.execute(CommandIDs.suspend, { session });
    }
  }

  /** Ids of this user's sessions that are idle and not pinned. */
  private _idle(): string[] {
    return this._model.sessions
      .filter(each => each.state === 'idle' && !each.pinned)
      .filter(each => !obstacle('suspend', each, this._trans))
      .map(each => each.id);
  }

  private _device(
    id: string,
    children: IRunningSessions.IRunningItem[]
  ): IRunningSessions.IRunningItem {
    const { _rows: rows, _trans: trans } = this;
    return {
      className: 'jp-Sing-deviceItem',
      context: id,
      icon: () => '',
      label: () => (
        <DeviceLabel rows={rows} id={id} trans={trans}>
          {[rows.device(id)?.name ?? '']}
        </DeviceLabel>
      ),
      children
    };
  }

  /** A session or a job, with what is below it. */
  private _entry(entry: IEntry, isNested = false): IRunningSessions.IRunningItem {
    const item = entry.isJob
      ? this._job(entry.id, entry.opens)
      : this._session(entry, 'tree', isNested);
    const children = entry.below.map(each => this._entry(each, entry.isJob));
    return children.length > 0 ? { ...item, children } : item;
  }

  private _job(id: string, opens = ''): IRunningSessions.IRunningItem {
    const { _rows: rows } = this;
    const open = this._opener(opens);
    return {
      className: 'jp-Sing-jobItem',
      context: id,
      icon: () => '',
      label: () => (
        <JobLabel rows={rows} id={id} open={open}>
          {rows.searched(id)}
        </JobLabel>
      ),
      open
    };
  }

  private _session(
    { id, opens }: IEntry,
    mode: 'tree' | 'list',
    isNested = false
  ): IRunningSessions.IRunningItem {
    const { _rows: rows, _trans: trans } = this;
    const execute = (command: string) => void this._commands.execute(command, { session: id });
    const open = this._opener(opens);
    return {
      className: opens ? `${SESSION_CLASS} jp-mod-mine` : SESSION_CLASS,
      context: id,
      icon: () => '',
      label: () => (
        <SessionLabel
          rows={rows}
          id={id}
          trans={trans}
          withDevice={mode === 'list' || isNested}
          isNested={isNested}
          execute={execute}
          open={open}
        >
          {rows.searched(id)}
        </SessionLabel>
      ),
      open
    };
  }

  /** Return what opens the notebook of a session; undefined without one. */
  private _opener(session: string): (() => void) | undefined {
    return session
      ? () => void this._commands.execute(CommandIDs.openNotebook, { session })
      : undefined;
  }

  private _outside(id: string): IRunningSessions.IRunningItem {
    const { _rows: rows, _trans: trans } = this;
    return {
      className: 'jp-Sing-outsideItem',
      context: id,
      icon: () => '',
      label: () => (
        <OutsideLabel rows={rows} id={id} trans={trans}>
          {rows.searched(id)}
        </OutsideLabel>
      )
    };
  }

  private _note(): IRunningSessions.IRunningItem {
    const { _rows: rows } = this;
    return {
      className: 'jp-Sing-note',
      icon: () => '',
      label: () => <NoteLabel rows={rows}>{[rows.note]}</NoteLabel>
    };
  }

  private readonly _rows: Rows;
}

/** Hold a resource while a widget is visible. */
export function whileVisible(widget: Widget, hold: () => IDisposable): void {
  let held: IDisposable | undefined;
  const update = () => {
    if (widget.isVisible && !held) {
      held = hold();
    } else if (!widget.isVisible) {
      held?.dispose();
      held = undefined;
    }
  };
  MessageLoop.installMessageHook(widget, (_, { type }) => {
    if (/^(after-(show|hide|attach|detach)|close-request)$/.test(type)) {
      queueMicrotask(update); // hooks are called before the widget updates its state
    }
    return true;
  });
  update();
}
