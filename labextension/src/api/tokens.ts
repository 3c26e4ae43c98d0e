import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import type { SingClient } from './client';
import type { components } from '../openapi';
import type { ISessionEvent } from './stream';

/** A device of the host, as `openapi.yaml` describes it. */
export type Device = components['schemas']['Device'];
export type Outside = components['schemas']['Outside'];

/** A device session, as `openapi.yaml` describes it. */
export type Session = components['schemas']['Session'];

/** A checkpoint, as `openapi.yaml` describes it. */
export type Checkpoint = components['schemas']['Checkpoint'];

/** State of a session. */
export type SessionState = Session['state'];

/**
 * The state of devices and sessions.
 *
 * It is kept up to date by the server's events, and requested only when events may have been missed
 * or while there is an observer: a view that shows data which events do not contain.
 */
export interface ISingModel {
  /** Devices, in the daemon's order; none without a daemon. */
  readonly devices: readonly Device[];
  /** Sessions, including those of other users that are visible to this user. */
  readonly sessions: readonly Session[];
  /** True if the server has answered at least once. */
  readonly isReady: boolean;
  /** Why the data may be out of date; empty if it is not. */
  readonly problem: string;
  /** True if the server did not answer the last request: the data is older. */
  readonly isUnreachable: boolean;
  /** Emitted after changes, at most once a frame. */
  readonly changed: ISignal<ISingModel, void>;
  /** Emitted for each event of the server about a session, after the model was updated. */
  readonly eventReceived: ISignal<ISingModel, ISessionEvent>;
  /** The session of a kernel, if it has one. */
  ofKernel(kernelId: string | null | undefined): Session | undefined;
  /** The session with an id. */
  get(id: string): Session | undefined;
  /** Request the status now. Never rejects: `problem` holds the error. */
  refresh(): Promise<void>;
  /** Update one session from an answer. */
  update(session: Session): void;
  /**
   * Keep data that events do not contain up to date until the result is disposed: for visible
   * views.
   */
  observe(): IDisposable;
}

/** The user's choices, as `schema/plugin.json` describes them. */
export type SingChoices = {
  showPanel: boolean;
  showPill: boolean;
  showStatusBar: boolean;
  notifications: boolean;
  confirmSuspend: boolean;
  confirmRestore: boolean;
  confirmDelete: boolean;
  pollSeconds: number;
};

/** The user's choices; the defaults until they are loaded. */
export interface ISingSettings {
  get<K extends keyof SingChoices>(key: K): SingChoices[K];
  /** Change a setting and save it. Never rejects. */
  set<K extends keyof SingChoices>(key: K, value: SingChoices[K]): Promise<void>;
  readonly changed: ISignal<ISingSettings, void>;
  /** Resolves when the settings are loaded. Never rejects. */
  readonly ready: Promise<void>;
}

/** Interface of this extension for its own parts, and for other extensions. */
export interface ISing {
  readonly client: SingClient;
  readonly model: ISingModel;
  readonly settings: ISingSettings;
}

export const ISing = new Token<ISing>(
  'jupyter-sing:ISing',
  'Devices and device sessions, and what can be done with them.'
);

/**
 * Ids of commands. Those about a session take `{ session?: string }`: its id; default: the current
 * session.
 */
export namespace CommandIDs {
  export const suspend = 'jupyter_sing:suspend';
  export const resume = 'jupyter_sing:resume';
  /** Also takes `device`; asks for it otherwise. */
  export const migrate = 'jupyter_sing:migrate';
  export const checkpoint = 'jupyter_sing:checkpoint';
  /** Also takes `name`; asks for it otherwise. */
  export const restore = 'jupyter_sing:restore';
  /** Toggles the pin. */
  export const pin = 'jupyter_sing:pin';
  export const openNotebook = 'jupyter_sing:open-notebook';
  export const openActivity = 'jupyter_sing:open-activity';
  export const openCheckpoints = 'jupyter_sing:open-checkpoints';
  export const refresh = 'jupyter_sing:refresh';
  /** Shows the state of this kernel's session. */
  export const showState = 'jupyter_sing:show-state';
}

export const EVENT_SCHEMA = 'https://schema.jupyter.org/jupyter_sing/session/v1';
export const PLUGIN_ID = 'jupyter-sing:plugin';
/** The domain of translations. */
export const DOMAIN = 'jupyter_sing';
