import type { Event } from '@jupyterlab/services';
import { EVENT_SCHEMA, type Session } from './tokens';

/** What the server says of a session when it has changed (`jupyter_sing/server/events/session-v1.yaml`). */
export interface ISessionEvent extends Partial<Session> {
  /** Its id. */
  session: string;
  /** It is no more. */
  ended?: boolean;
  /** The checkpoint that gives a notebook back whose kernel died. */
  checkpoint?: string;
  /** The line that restores it. */
  command?: string;
}

/** Return what an emission says of a session, or nothing if it is about something else. */
export function sessionEvent(emission: Event.Emission): ISessionEvent | null {
  if (emission.schema_id !== EVENT_SCHEMA || typeof emission.session !== 'string') {
    return null;
  }
  const { schema_id, ...rest } = emission;
  const told = Object.entries(rest).filter(([key]) => !key.startsWith('__'));
  return Object.fromEntries(told) as unknown as ISessionEvent;
}
