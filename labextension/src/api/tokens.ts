import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';
import type { SingClient } from './client';
import type { components } from '../openapi';
import type { ISessionEvent } from './stream';

/** A device of the host, as `openapi.yaml` describes it. */
export type Device = components['schemas']['Device'];

/** A device session, as `openapi.yaml` describes it. */
export type Session = components['schemas']['Session'];

/** A saved notebook, as `openapi.yaml` describes it. */
export type Checkpoint = components['schemas']['Checkpoint'];

/** What a session does. */
export type SessionState = Session['state'];

/**
 * What is known of devices and sessions.
 *
 * It is kept up to date by the server's events, and asked for only when these may have been missed
 * or while a view is observed that shows what they do not tell.
 */
export interface ISingModel {
  /** Devices, in the daemon's order; none without a daemon. */
  readonly devices: readonly Device[];
  /** Sessions, those of other users included as far as they are shown to us. */
  readonly sessions: readonly Session[];
  /** Whether the server has answered at all. */
  readonly isReady: boolean;
  /** Why what is shown may be out of date; empty if it is not. */
  readonly problem: string;
  /** Whether the server did not answer when it was asked last: what is shown was so before. */
  readonly isUnreachable: boolean;
  /** Emitted after changes, at most once a frame. */
  readonly changed: ISignal<ISingModel, void>;
  /** Emitted for each event of the server about a session, when what it says is known here. */
  readonly told: ISignal<ISingModel, ISessionEvent>;
  /** The session of a kernel, if it has one. */
  ofKernel(kernelId: string | null | undefined): Session | undefined;
  /** The session with an id. */
  get(id: string): Session | undefined;
  /** Ask the server now. Never rejects: `problem` says what failed. */
  refresh(): Promise<void>;
  /** Take over what an answer says about one session. */
  update(session: Session): void;
  /** Keep what events do not tell up to date until the result is disposed: for visible views. */
  observe(): IDisposable;
}

/** What users choose, as `schema/plugin.json` describes it. */
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

/** What this user has chosen; the defaults until that is known. */
export interface ISingSettings {
  get<K extends keyof SingChoices>(key: K): SingChoices[K];
  /** Choose, and remember it. Never rejects. */
  set<K extends keyof SingChoices>(key: K, value: SingChoices[K]): Promise<void>;
  readonly changed: ISignal<ISingSettings, void>;
  /** Resolves when it is known. Never rejects. */
  readonly ready: Promise<void>;
}

/** What this extension offers to its own parts, and to other extensions. */
export interface ISing {
  readonly client: SingClient;
  readonly model: ISingModel;
  readonly settings: ISingSettings;
}

export const ISing = new Token<ISing>(
  'jupyter-sing:ISing',
  'Devices and device sessions, and what can be done with them.'
);

/** Ids of commands. Those about a session take `{ session?: string }`: its id, else the current's. */
export namespace CommandIDs {
  export const suspend = 'jupyter_sing:suspend';
  export const resume = 'jupyter_sing:resume';
  /** Also takes `device`; asks for it otherwise. */
  export const migrate = 'jupyter_sing:migrate';
  export const checkpoint = 'jupyter_sing:checkpoint';
  /** Also takes `name`; asks for it otherwise. */
  export const restore = 'jupyter_sing:restore';
  /** Toggles. */
  export const pin = 'jupyter_sing:pin';
  export const openNotebook = 'jupyter_sing:open-notebook';
  export const openActivity = 'jupyter_sing:open-activity';
  export const openCheckpoints = 'jupyter_sing:open-checkpoints';
  export const refresh = 'jupyter_sing:refresh';
  /** Shows what this kernel's session does. */
  export const showState = 'jupyter_sing:show-state';
}

export const EVENT_SCHEMA = 'https://schema.jupyter.org/jupyter_sing/session/v1';
export const PLUGIN_ID = 'jupyter-sing:plugin';
/** The domain of translations. */
export const DOMAIN = 'jupyter_sing';
