"""Sentences that tell users why a session is in its state."""

from __future__ import annotations

import contextlib
import functools
import pwd
from pathlib import Path

from kernelproxy.agent.session.suspend_hold import SuspendHold
from kernelproxy.common.readable import moment

RUNNING = "Running on the GPU."
ELSEWHERE = "A cell runs on the CPU. Others may use the GPU until it needs it again."
UNUSED = "Not used yet. Starts when the notebook first uses the GPU."
EVER_IDLE = "Idle. Stays on its GPU until others need it; nothing is lost."
PINNED = "Idle. Pinned: stays on its GPU."
RESTORED = "Resuming on its GPU."
STARTS = "Starting on its GPU."
REBUILT = "The GPU process ended unexpectedly. Rebuilding its state; nothing is lost."
NO_ROOM = "There is too little memory now to rebuild its state."
APPROXIMATE = (
    "Some of its GPU operations give slightly other values each time, so values that the notebook "
    "has read may differ slightly from its state."
)


def device_lost(words: str, *, skipped: bool, careful: bool) -> str:
    """Return what follows when a device rejected the work of a session's worker, in `words`.

    Parameters
    ----------
    words : str
    skipped : bool
        Whether the operation at fault was found.
    careful : bool
        Whether the next worker looks for it.
    """
    if skipped:
        return f"{words}: one operation was skipped. Everything else is rebuilt."
    if careful:
        return f"{words}. Rebuilding its state one operation after the other, to find the cause."
    return f"{words}. Rebuilding its state; nothing is lost."


_SUBORDINATE = Path("/etc/subuid")


def way_back(hold: SuspendHold | None, *, script: bool) -> str:
    """Return a sentence about what resumes a suspended session; see Note [Holding].

    `script`: True if it is a program, not a notebook.
    """
    if script:
        return "Resumes on request." if hold else "Resumes when the program uses the GPU."
    if hold is None:
        return "Resumes when you run a cell."
    if hold.in_cell and not hold.by_itself:
        return "Resumes when you run anything."
    return "Resumes when you run the next cell."


def held(hold: SuspendHold, why: str, user: str, *, script: bool) -> str:
    """Return who suspended a session of `user`, and when; `why` is the clause that they gave."""
    if hold.in_cell and not hold.by_itself:
        where = "" if script else ", in the middle of a cell"
        return f"Paused by {hold.by}, {moment(hold.at)}{where}."
    return f"{why}." if hold.by == user else f"Suspended by {hold.by}, {moment(hold.at)}."


@functools.lru_cache(maxsize=4096)  # names may come from a directory server
def user_name(uid: int) -> str:
    """Return the name of a user; ``uid:N`` of one without a name, as policies spell it.

    Subordinate uids, which ``/etc/subuid`` assigns to users for containers, are ``subuid:N``: the
    user of a range can act as any uid in it, so a policy never means one of those by ``uid:N``.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"subuid:{uid}" if _is_subordinate(uid) else f"uid:{uid}"


def _is_subordinate(uid: int) -> bool:
    """Return True if a uid is in any user's range of subordinate uids."""
    try:
        lines = _SUBORDINATE.read_text(errors="replace").splitlines()
    except OSError:  # then there are no subordinate uids
        return False
    for line in lines:
        with contextlib.suppress(ValueError):
            _, start, count = line.split(":")
            if int(start) <= uid < int(start) + int(count):
                return True
    return False
