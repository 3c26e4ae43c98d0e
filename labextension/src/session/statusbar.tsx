import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import { Signal } from '@lumino/signaling';
import * as React from 'react';
import { devicesText, devicesTextsMax, waitingCount } from '../text/facts';
import { deviceIcon } from '../ui/icons';
import { contextOf, sessionOf } from '../model/kernels';
import { ReservedWidth } from '../ui/reservedwidth';
import { type Device, DOMAIN, ISing, type ISingModel } from '../api/tokens';

/** JupyterLab's own command; its panel has our section. */
const SHOW_RUNNING_PANEL = 'running:show-panel';
/** Before the kernel's state, whose width changes often; the width of this item does not. */
const RANK = 0.5;

/**
 * Memory use of the current notebook's device, or of all devices, and the number of waiting
 * sessions.
 */
export class StatusItem extends ReactWidget {
  /** Emitted when its text, or whether it is shown, may have changed. */
  readonly changed = new Signal<this, void>(this);

  constructor(private readonly options: StatusItem.IOptions) {
    super();
    options.model.changed.connect(this._onChange, this);
  }

  /** The kernel whose device is shown; undefined: all devices are shown. */
  set context(context: ISessionContext | undefined) {
    if (context === this._context) {
      return;
    }
    this._context?.kernelChanged.disconnect(this._onChange, this);
    this._context = context;
    context?.kernelChanged.connect(this._onChange, this);
    this._onChange();
  }

  /** True if there is anything to show. */
  get isActive(): boolean {
    const { devices, sessions } = this.options.model;
    return devices.length > 0 && sessions.length > 0;
  }

  protected override render(): React.ReactElement | null {
    if (!this.isActive) {
      return null;
    }
    const { model, trans, onClick } = this.options;
    const { devices, sessions } = model;
    const id = sessionOf(model, this._context)?.device;
    const device = devices.find(each => each.id === id);
    const shown = device ? [device] : devices;
    const text = (some: readonly Device[], one?: Device) =>
      devicesText(some, waitingCount(sessions, one), trans);
    const details = devices.map(each => text([each], each));
    return (
      <button
        type="button"
        className="jp-SingStatus jp-StatusBar-TextItem jp-mod-highlighted"
        title={[...details, trans.__('Click to see the sessions on each GPU.')].join('\n')}
        onClick={onClick}
      >
        <deviceIcon.react tag="span" className="jp-SingStatus-icon" />
        <span className="jp-SingReservedWidth">
          <span>{text(shown, device)}</span>
          <ReservedWidth for={devicesTextsMax(shown, trans)} />
        </span>
      </button>
    );
  }

  private _onChange(): void {
    this.changed.emit();
  }

  private _context: ISessionContext | undefined;
}

export namespace StatusItem {
  export interface IOptions {
    model: ISingModel;
    trans: TranslationBundle;
    onClick: () => void;
  }
}

/** Shows devices in the status bar. */
export const statusBar: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-sing:status-bar',
  description: 'Shows GPU memory use and the number of waiting sessions in the status bar.',
  autoStart: true,
  requires: [ISing],
  optional: [IStatusBar, ITranslator],
  activate: (
    { commands, shell }: JupyterFrontEnd,
    { model, settings }: ISing,
    bar: IStatusBar | null,
    translator: ITranslator | null
  ) => {
    if (bar === null) {
      return;
    }
    const trans = (translator ?? nullTranslator).load(DOMAIN);
    const onClick = () => {
      if (commands.hasCommand(SHOW_RUNNING_PANEL)) {
        void commands.execute(SHOW_RUNNING_PANEL);
      }
    };
    const item = new StatusItem({ model, trans, onClick });
    const follow = () => (item.context = contextOf(shell.currentWidget));
    shell.currentChanged?.connect(follow);
    follow();
    settings.changed.connect(() => item.changed.emit());
    bar.registerStatusItem('jupyter-sing:status-bar', {
      item,
      align: 'left',
      rank: RANK,
      isActive: () => item.isActive && settings.get('showStatusBar'),
      activeStateChanged: item.changed
    });
  }
};
