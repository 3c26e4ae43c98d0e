import { Dialog, InputDialog, ReactWidget, showDialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import { UseSignal } from '@jupyterlab/ui-components';
import React from 'react';
import { waitingCount } from '../text/facts';
import { MemoryBar } from '../ui/memorybar';
import type { ISing, ISingModel, Session } from '../api/tokens';
import { checkpointName, likelyTarget, capacityOn, capacityText } from '../text/sessionactions';
import { occupancyText, usedPercent } from '../text/format';
import { deviceName, sessionName } from '../text/words';

/**
 * Ask for confirmation before a running session is suspended, unless the user has disabled that.
 */
export async function mayBeSuspended(
  { settings }: ISing,
  session: Session,
  trans: TranslationBundle
): Promise<boolean> {
  if (session.state !== 'running' || !settings.get('confirmSuspend')) {
    return true;
  }
  const answer = await showDialog({
    title: trans.__('Suspend %1?', sessionName(session, trans)),
    body: trans.__(
      'A cell is running. It pauses until you resume the session or run a cell. Nothing is lost.'
    ),
    checkbox: { label: trans.__('Do not ask again'), checked: false },
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.okButton({ label: trans.__('Suspend') })
    ]
  });
  if (answer.button.accept && answer.isChecked) {
    await settings.set('confirmSuspend', false);
  }
  return answer.button.accept;
}

/** Ask for the name of a new checkpoint: empty lets the daemon choose; null if cancelled. */
export async function askForName(
  session: Session,
  trans: TranslationBundle
): Promise<string | null> {
  const answer = await InputDialog.getText({
    title: trans.__('Save checkpoint of %1', sessionName(session, trans)),
    label: trans.__('Name (optional)'),
    text: checkpointName(session, new Date()),
    pattern: '[0-9A-Za-z][0-9A-Za-z._@+\\-]*',
    okLabel: trans.__('Save')
  });
  return answer.button.accept ? (answer.value ?? '').trim() : null;
}

/** Ask for a device to which to move a session; null if cancelled. */
export async function askForDevice(
  model: ISingModel,
  session: Session,
  trans: TranslationBundle
): Promise<string | null> {
  const answer = await showDialog({
    title: trans.__('Migrate %1 to', sessionName(session, trans)),
    body: new DevicePicker(model, session, trans),
    focusNodeSelector: 'input:checked',
    buttons: [
      Dialog.cancelButton({ label: trans.__('Cancel') }),
      Dialog.okButton({ label: trans.__('Migrate') })
    ]
  });
  return answer.button.accept ? answer.value : null;
}

/** A list to choose a device from, with the current memory use. */
class DevicePicker extends ReactWidget implements Dialog.IBodyWidget<string | null> {
  constructor(
    private readonly _model: ISingModel,
    private readonly _session: Session,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-Sing-devicePicker');
    this._chosen = likelyTarget(_model.devices, _session)?.id ?? null;
  }

  getValue(): string | null {
    return this._chosen;
  }

  protected render(): React.JSX.Element {
    return (
      <UseSignal signal={this._model.changed}>
        {() => (
          <fieldset aria-label={this._trans.__('GPUs')}>
            {this._model.devices.map(each => this._choice(each))}
          </fieldset>
        )}
      </UseSignal>
    );
  }

  private _choice(device: ISingModel['devices'][number]): React.JSX.Element {
    const session = this._model.get(this._session.id) ?? this._session;
    const room = capacityOn(device, session);
    const waiting = waitingCount(this._model.sessions, device);
    const words = [occupancyText(device), capacityText(room, this._trans)];
    if (waiting > 0) {
      words.splice(1, 0, this._trans.__('%1 waiting', waiting));
    }
    return (
      <label key={device.id} className="jp-Sing-device">
        <input
          type="radio"
          name="device"
          value={device.id}
          defaultChecked={device.id === this._chosen}
          disabled={room === 'here' || room === 'small'}
          onChange={() => (this._chosen = device.id)}
        />
        <span className="jp-Sing-deviceName">{deviceName(device.id)}</span>
        <MemoryBar
          device={deviceName(device.id)}
          used={usedPercent(device)}
          text={occupancyText(device)}
          trans={this._trans}
        />
        <span className="jp-Sing-deviceWords">{words.join(' · ')}</span>
      </label>
    );
  }

  private _chosen: string | null;
}
