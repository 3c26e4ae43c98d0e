import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { SingClient } from '../api/client';
import { SingModel } from './model';
import { SingSettings } from './settings';
import { ISing, PLUGIN_ID } from '../api/tokens';

/** Provides the state of devices and sessions to all other parts. */
export const core: JupyterFrontEndPlugin<ISing> = {
  id: PLUGIN_ID,
  description: 'Provides the state of GPUs and GPU sessions to other plugins.',
  autoStart: true,
  provides: ISing,
  optional: [ISettingRegistry],
  activate: (app: JupyterFrontEnd, registry: ISettingRegistry | null): ISing => {
    const { serviceManager } = app;
    const client = new SingClient(serviceManager.serverSettings);
    const model = new SingModel({ client, events: serviceManager.events });
    // Events are missed while a connection is interrupted, or while the page sleeps.
    serviceManager.connectionFailure.connect(() => model.invalidate());
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) {
        model.invalidate();
      }
    });
    const settings = new SingSettings(registry);
    settings.changed.connect(() => (model.interval = 1000 * settings.get('pollSeconds')));
    return { client, model, settings };
  }
};
