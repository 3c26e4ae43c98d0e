"""Sessions and devices as `jupyter sing status --json` shows them, and the sentences in it."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kernelproxy.agent.devices.co_tenants import known_as, shared
from kernelproxy.agent.devices.device_allocator import Room
from kernelproxy.agent.session.states import State
from kernelproxy.agent.workers.worker import Snapshot
from kernelproxy.common.protocol.views import (
    DeviceView,
    MigrationView,
    ProgressView,
    SessionView,
    SharedView,
    SnapshotView,
    Tier,
)
from kernelproxy.common.readable import device_name, moment
from kernelproxy.native.libraries import Compiling

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session
    from kernelproxy.agent.session.suspend_hold import Hold

RUNNING = "Running on the GPU."
ELSEWHERE = "A cell runs on the CPU. Others may use the GPU until it needs it again."
UNUSED = "Not used yet. Starts when the notebook first uses the GPU."
EVER_IDLE = "Idle. Stays on its GPU until others need it; nothing is lost."
PINNED = "Idle. Pinned: stays on its GPU."
RESTORED = "Resuming on its GPU."
STARTS = "Starting on its GPU."
REBUILT = "The GPU process ended unexpectedly. Rebuilding its state; nothing is lost."

#: States in which a session without a worker waits for one, or will when a cell runs.
_BEFORE_WORKERS = {State.IDLE, State.QUEUED, State.RESTORING}
_SUBORDINATE = Path("/etc/subuid")


def describe_session(session: Session, *, asking: bool = False) -> SessionView:
    """Return a session's entry in the status reply; `asking` as in `Session.standing`."""
    session.observe()
    standing, reason = session.standing(asking=asking)
    state, memory = session.device_state, session.device_state.memory
    client = memory.client
    worker = state.worker if state.worker and not state.worker.broken else None
    step = session.turn.watch.step
    queued_since = session.since if standing is State.QUEUED else None
    outlook = session.returning.outlook()
    suspended = standing is State.SUSPENDED
    return {
        "id": session.id,
        "name": session.name,
        "owner": session.user,
        "kernel_id": session.kernel_id,
        "kernel_pid": session.kernel.pid,
        "worker_pid": worker.pid if worker else None,
        "state": str(standing),
        "tier": _tier(session, worker is not None),
        "device": session.room.device.id,
        "memory": memory_used(session),
        "log_head": client.head,
        "log_consumed": memory.worker.consumed,
        "log_bytes": client.head - memory.agent.retained,
        "last_activity": timestamp(session.idleness.active),
        "operators": client.operators,
        "gpu_seconds": memory.worker.busy_ns / 1e9,
        "step_seconds": step.seconds if step else None,
        "memory_nadir": step.memory_min if step else None,
        "recoverable": not state.forgone,
        "served_as": session.allowance.tier,
        "promised": session.allowance.promised,
        "queued_for": round(time.monotonic() - queued_since, 3) if queued_since else 0.0,
        "queue_position": outlook.position if outlook else None,
        "expected_wait": _rounded(outlook.seconds) if outlook else None,
        "suspended_by": session.hold.by or None if suspended and session.hold else None,
        "suspended_at": timestamp(session.since) if suspended else None,
        "shared": _shared(session),
        "pinned": session.wanted.pinned,
        "priority": session.wanted.tier,
        "reason": _reason(session, outlook.reason if outlook else reason),
        "loading": memory.worker.loading_bytes if worker else 0,
        "snapshot": _snapshot(state.snapshot),
        "migration": _migration(session),
        "automatic": session.automatic.describe(),
        "last_checkpoint": session.past.describe(),
        "progress": session.checkpointing.underway.describe() or _prepared(session),
    }


def awaited_compilation(session: Session) -> Compiling | None:
    """Return what has to be compiled before a session without a worker can get one."""
    if session.device_state.worker is not None or session.state not in _BEFORE_WORKERS:
        return None
    return session.zygotes.compiling(session.python)


def _prepared(session: Session) -> ProgressView | None:
    """Return the progress of that compilation, as ``progress`` in ``openapi.yaml``."""
    found = awaited_compilation(session)
    if found is None:
        return None
    return {"verb": "prepare", "checkpoint": "", "done": found.done, "total": found.total}


def _shared(session: Session) -> SharedView | None:
    """Return the sessions with which it shares devices; None if a user suspended it."""
    if session.arbiter.keeps or session.hold is not None:
        return None
    return shared(session, session.room.rooms)


def memory_used(session: Session) -> int:
    """Return the bytes of its device that a session uses."""
    state, memory = session.device_state, session.device_state.memory
    if state.worker is None or state.worker.broken:
        return 0
    return min(memory.client.memory_used, memory.agent.memory_granted)


def running(session: Session) -> str:
    """Return a sentence about a session that executes, and about the sessions beside it."""
    others = session.turn.watch.company()
    if not others or session.arbiter.keeps:
        return RUNNING
    device = device_name(session.room.device.id)
    tenants = session.room.tenants
    names = " and ".join(known_as(session, tenants.get(each)) for each in others)
    return f"{RUNNING} Shares {device} with {names} as long as that is faster for both."


def idle(session: Session) -> str:
    """Return a sentence about a session that has nothing to do."""
    left = session.idleness.seconds_left()
    if session.wanted.pinned:
        return PINNED
    if session.stuck:
        return f"Idle, and stays on its device. {session.stuck}"
    if left == float("inf"):
        return EVER_IDLE
    return f"Idle. Suspends at {moment(time.time() + left)}; nothing is lost."


#: Fields of other users' sessions that are visible in a shared daemon: who uses how much.
_OUTLINE = {
    "id", "owner", "state", "tier", "device", "memory", "queued_for", "last_activity",
    "recoverable",
}  # fmt: skip
#: Fields that are null in such an outline, not blank.
_UNSAID = {
    "kernel_pid", "worker_pid", "queue_position", "expected_wait", "suspended_by", "suspended_at",
    "promised",
}  # fmt: skip


def outline(session: SessionView) -> SessionView:
    """Return a session's description for other users than its owner: mostly blank fields."""
    found = {k: value if k in _OUTLINE else _blank(value) for k, value in session.items()}
    # Optional objects become null.
    none = {k: None for k, value in session.items() if isinstance(value, dict)}
    automatic = {k: _blank(value) for k, value in session["automatic"].items()}
    unsaid = dict.fromkeys(_UNSAID & session.keys())
    return cast("SessionView", {**found, **none, "automatic": automatic, **unsaid})


def shown(session: SessionView, owner: int, uid: int) -> SessionView:
    """Return a session's description as the user `uid` may see it."""
    return session if uid in (owner, os.getuid(), 0) else outline(session)


def _blank(value: Any) -> Any:
    return None if value is None else type(value)()


def _tier(session: Session, resident: bool) -> Tier:
    """Return where its state is."""
    if resident:
        return "resident"
    return "cold" if session.device_state.cold or session.hibernation.asleep else "parked"


def _rounded(seconds: float | None) -> float | None:
    """Return seconds, rounded to the precision that an estimate can have."""
    return None if seconds is None else round(max(0.0, seconds), 1 if seconds < 10.0 else 0)


def _reason(session: Session, reason: str) -> str:
    """Return why it is in its state, and what it cannot do now but should."""
    if session.state is State.FAILED:
        return reason
    if session.device_state.forgone:
        reason = f"{reason} Not protected now: {session.upkeep.obstacle}"
    if session.hibernation.problem:
        reason = f"{reason} Cannot hibernate: {session.hibernation.problem}"
    if session.allowance.shortfall:
        reason = f"{reason} {session.allowance.shortfall}"
    return reason


def _migration(session: Session) -> MigrationView | None:
    """Return the last migration of a session, or None."""
    return cast("MigrationView", asdict(session.migration)) if session.migration else None


def _snapshot(snapshot: Snapshot | None) -> SnapshotView | None:
    """Return the newest snapshot of a session, or None."""
    if snapshot is None:
        return None
    return {
        "taken": timestamp(snapshot.taken),
        "position": snapshot.position,
        "bytes": snapshot.bytes,
        "copied": snapshot.copied,
        "seconds": snapshot.seconds,
        "stalled": snapshot.stalled_ns / 1e9,
    }


def describe_device(room: Room, sessions: Sequence[SessionView]) -> DeviceView:
    """Return a device's entry in the reply to `StatusRequest`, given all sessions of the reply."""
    here = [each for each in sessions if each["device"] == room.device.id]
    return {
        "id": room.device.id,
        "kind": room.device.kind.name.lower(),
        "name": room.device.name,
        "memory_total": room.device.memory_total,
        "memory_used": sum(each["memory"] for each in here),
        "sessions": [each["id"] for each in here],
    }


def way_back(session: Session) -> str:
    """Return a sentence about what resumes a suspended session; see Note [Holding]."""
    hold = session.hold
    if session.script:
        return "Resumes on request." if hold else "Resumes when the program uses the GPU."
    if hold is None:
        return "Resumes when you run a cell."
    if hold.in_cell and not hold.by_itself:
        return "Resumes when you run anything."
    return "Resumes when you run the next cell."


def held(session: Session, hold: Hold, why: str) -> str:
    """Return who suspended a session, and when; `why` is the clause given by its own user."""
    if hold.in_cell and not hold.by_itself:
        where = "" if session.script else ", in the middle of a cell"
        return f"Paused by {hold.by}, {moment(hold.at)}{where}."
    return f"{why}." if hold.by == session.user else f"Suspended by {hold.by}, {moment(hold.at)}."


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


def timestamp(monotonic: float) -> str:
    """Return a time of the monotonic clock in ISO 8601."""
    age = max(0.0, time.monotonic() - monotonic)
    return datetime.fromtimestamp(time.time() - age, UTC).isoformat(timespec="milliseconds")
