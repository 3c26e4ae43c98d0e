import type { components } from '../openapi';
import type { SessionState } from './tokens';

/** A state in which a session is on a device: the states of the activity record. */
export type HeldState = components['schemas']['Span']['state'];

/** Properties of a state. */
interface IStateTraits {
  /** True if device memory is in use or changes, whatever the session's size says. */
  readonly executes?: boolean;
  /** True if it must end before another action is possible. */
  readonly isTransition?: boolean;
  /** True if a bar shows that work is in progress. */
  readonly hasBar?: boolean;
}

/**
 * The properties of every state; a state that is missing here does not compile.
 *
 * `tests/unit/agent/session/test_states.py` compares them with the daemon's.
 */
export const TRAITS: Readonly<Record<SessionState, IStateTraits>> = {
  idle: {},
  running: { executes: true },
  queued: {},
  suspended: {},
  restoring: { executes: true, isTransition: true, hasBar: true },
  migrating: { executes: true, isTransition: true, hasBar: true },
  failed: {},
  preparing: { hasBar: true }
};

/** Rank of the states on a device, in the order of legends: the state with a higher rank is shown. */
export const RANKS: Readonly<Record<HeldState, number>> = {
  running: 4,
  idle: 1,
  restoring: 2,
  migrating: 3
};
