"""The states of a session: one table of their properties, and the transitions between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernelproxy.common.errors import InternalError


class State(StrEnum):
    """The user-visible state of a session.

    ``running`` and ``idle`` mostly have a worker; the shared pages tell which of the two it is (a
    cell runs, or the log is not drained). A session that was never used is idle without a worker.
    ``queued`` wants to execute and waits for its lease, or for device memory. ``failed`` is final.
    ``preparing`` is only shown, never entered: what its first worker needs is being compiled.
    """

    IDLE = "idle"
    RUNNING = "running"
    QUEUED = "queued"
    SUSPENDED = "suspended"
    RESTORING = "restoring"
    MIGRATING = "migrating"
    FAILED = "failed"
    PREPARING = "preparing"


@dataclass(frozen=True)
class StateTraits:
    """The properties of a state from which other modules derive what they do in it.

    Parameters
    ----------
    has_worker : bool
        True if a worker is there or is being started: a change between two such states need not
        be persisted.
    occupies : int
        0 if the session is on no device. Otherwise the rank of the state: where a chart merges
        short periods, the higher rank is shown.
    executes : bool
        True if its device memory changes while it is in this state.
    changes_unreported : bool
        True if the shared pages may change in it without a message: it is polled.
    before_worker : bool
        True if a session without a worker waits for one in it, or will when a cell runs.
    """

    has_worker: bool = False
    occupies: int = 0
    executes: bool = False
    changes_unreported: bool = False
    before_worker: bool = False


TRAITS: dict[State, StateTraits] = {
    State.IDLE: StateTraits(has_worker=True, occupies=1, before_worker=True),
    State.RUNNING: StateTraits(has_worker=True, occupies=4, executes=True, changes_unreported=True),
    State.QUEUED: StateTraits(changes_unreported=True, before_worker=True),
    State.SUSPENDED: StateTraits(),
    State.RESTORING: StateTraits(
        has_worker=True, occupies=2, executes=True, changes_unreported=True, before_worker=True
    ),
    State.MIGRATING: StateTraits(occupies=3, executes=True, changes_unreported=True),
    State.FAILED: StateTraits(),
    State.PREPARING: StateTraits(),
}

_I, _R, _Q, _S, _T, _M, _F, _P = State

# from: to. When its worker dies, a session goes from running, idle and restoring to restoring (or
# to queued, if its memory was taken meanwhile). Every state can fail; failed is final.
ALLOWED: dict[State, frozenset[State]] = {
    _I: frozenset({_R, _S, _T, _Q, _M, _F}),
    _R: frozenset({_I, _S, _T, _Q, _M, _F}),
    _Q: frozenset({_R, _I, _S, _T, _M, _F}),
    _S: frozenset({_T, _Q, _F}),
    _T: frozenset({_R, _I, _Q, _S, _F}),
    _M: frozenset({_R, _I, _S, _T, _F}),
    _F: frozenset(),
    _P: frozenset(),
}


def check_transition(before: State, after: State) -> None:
    """Check a transition against the table; staying in a state is always allowed.

    Raises
    ------
    InternalError
        If there is no such transition.
    """
    if after is not before and after not in ALLOWED[before]:
        raise InternalError(f"a session went from {before} to {after}")
