import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Signal } from '@lumino/signaling';
import { type ISingSettings, PLUGIN_ID, type SingChoices } from '../api/tokens';

/** Values until the settings are loaded, or if that fails: as in `schema/plugin.json`. */
export const DEFAULTS: SingChoices = {
  showPanel: true,
  showPill: true,
  showStatusBar: true,
  notifications: true,
  confirmSuspend: true,
  confirmRestore: true,
  confirmDelete: true,
  pollSeconds: 10
};

/** The user's choices, see `ISingSettings`. */
export class SingSettings implements ISingSettings {
  readonly changed = new Signal<this, void>(this);
  readonly ready: Promise<void>;

  /** @param registry - The settings of JupyterLab; null: the defaults are used. */
  constructor(registry: ISettingRegistry | null) {
    this.ready = registry === null ? Promise.resolve() : this._follow(registry);
  }

  get<K extends keyof SingChoices>(key: K): SingChoices[K] {
    return this._choices[key];
  }

  async set<K extends keyof SingChoices>(key: K, value: SingChoices[K]): Promise<void> {
    this._apply({ ...this._choices, [key]: value });
    try {
      await this._saved?.set(key, value);
    } catch (error) {
      console.warn('jupyter_sing: settings cannot be saved', error);
    }
  }

  private async _follow(registry: ISettingRegistry): Promise<void> {
    try {
      const saved = (this._saved = await registry.load(PLUGIN_ID));
      const read = () => this._apply(saved.composite as Partial<SingChoices>);
      saved.changed.connect(read);
      read();
    } catch (error) {
      console.warn('jupyter_sing: settings cannot be read', error);
    }
  }

  private _apply(choices: Partial<SingChoices>): void {
    this._choices = { ...DEFAULTS, ...choices };
    this.changed.emit();
  }

  private _choices: SingChoices = DEFAULTS;
  private _saved: ISettingRegistry.ISettings | undefined;
}
