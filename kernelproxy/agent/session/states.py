"""The states of a session and the ways between them."""

from __future__ import annotations

from enum import StrEnum

from kernelproxy.common.errors import InternalError


class State(StrEnum):
    """What a session does, as people see it.

    ``running`` and ``idle`` mostly have a worker and are told apart by the pages (a cell runs, or
    the log is not drained). A session that was never used is idle without one. ``queued`` wants
    to execute and waits for its turn, or for room. ``failed`` is the end. ``preparing`` is
    only told: what its first worker needs is being compiled.
    """

    IDLE = "idle"
    RUNNING = "running"
    QUEUED = "queued"
    SUSPENDED = "suspended"
    RESTORING = "restoring"
    MIGRATING = "migrating"
    FAILED = "failed"
    PREPARING = "preparing"


_I, _R, _Q, _S, _T, _M, _F, _P = State

# from: to. A dead worker takes running, idle and restoring to restoring (or queued, if the room
# is gone); everything can fail, and nothing leaves failed.
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
    """Hold a change of state against the table; staying is always allowed.

    Raises
    ------
    InternalError
        If there is no such way.
    """
    if after is not before and after not in ALLOWED[before]:
        raise InternalError(f"a session went from {before} to {after}")
