import type { Event } from '@jupyterlab/services';
import { EVENT_SCHEMA, type Session } from './tokens';

/**
 * An event of the server about a changed session (`jupyter_sing/server/events/session-v1.yaml`).
 */
export interface ISessionEvent extends Partial<Session> {
  /** The session's id. */
  session: string;
  /** True if the session has ended. */
  ended?: boolean;
  /** The checkpoint from which a notebook can be restored whose kernel died. */
  checkpoint?: string;
  /** The command that restores it. */
  command?: string;
}

/** Return the event about a session in an emission, or null if it is about something else. */
export function sessionEvent(emission: Event.Emission): ISessionEvent | null {
  if (emission.schema_id !== EVENT_SCHEMA || typeof emission.session !== 'string') {
    return null;
  }
  const { schema_id, ...rest } = emission;
  const fields = Object.entries(rest).filter(([key]) => !key.startsWith('__'));
  return Object.fromEntries(fields) as unknown as ISessionEvent;
}
