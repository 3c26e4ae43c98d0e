"""Sessions and devices as `jupyter sing status --json` shows them. Describing changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, cast

from kernelproxy.agent.devices.co_tenants import shared
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.devices.measured_memory import MeasuredMemory
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.states import State
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.protocol.views import (
    DeviceView,
    ExactnessView,
    MigrationView,
    OutsideView,
    ProgressView,
    SessionView,
    SharedView,
    SnapshotView,
    Tier,
)


def describe_session(session: Session, *, asking: bool = False) -> SessionView:
    """Return a session's entry in the reply to `Status`; `asking` as in `ObservedState`."""
    shown, reason = session.observed.user_visible(asking=asking)
    core, hold = session.core, session.demand.hold
    state, memory = session.device_state, session.device_state.memory
    client = memory.client
    worker = state.worker if state.worker and not state.worker.broken else None
    step = session.lease.monitor.step
    queued = shown is State.QUEUED
    queued_since = core.since if queued and core.state is State.QUEUED else None
    outlook = session.waiting.outlook() if queued else None
    suspended = shown is State.SUSPENDED
    job = session.membership.job
    return {
        "id": session.id,
        "name": core.name,
        "owner": core.user,
        "kernel_id": core.kernel_id,
        "kernel_pid": session.kernel.pid,
        "worker_pid": worker.pid if worker else None,
        "state": str(shown),
        "tier": _tier(session, worker is not None),
        "device": core.allocator.device.id,
        "memory": memory_used(session),
        "log_head": client.head,
        "log_consumed": memory.worker.consumed,
        "log_bytes": client.head - memory.agent.retained,
        "last_activity": timestamp(session.idle.active),
        "operators": client.operators,
        "gpu_seconds": memory.worker.busy_ns / 1e9,
        "step_seconds": step.seconds if step else None,
        "memory_nadir": step.memory_min if step else None,
        "recoverable": not state.unrecoverable,
        "served_as": session.allowance.tier,
        "promised": session.allowance.promised,
        "queued_for": round(time.monotonic() - queued_since, 3) if queued_since else 0.0,
        "queue_position": outlook.position if outlook else None,
        "expected_wait": _rounded(outlook.seconds) if outlook else None,
        "suspended_by": hold.by or None if suspended and hold else None,
        "suspended_at": timestamp(core.since) if suspended else None,
        "shared": None if job and job.size > 1 else _shared(session),
        "pinned": session.preferences.pinned,
        "priority": session.preferences.tier,
        "reason": _reason(session, outlook.reason if outlook else reason),
        "loading": memory.worker.loading_bytes if worker else 0,
        "snapshot": _snapshot(state.snapshot),
        "migration": _migration(session),
        "exactness": _exactness(session),
        "automatic": session.automatic.describe(),
        "last_checkpoint": session.history.describe(),
        "progress": session.requests.underway.describe() or _prepared(session),
        "parent": core.request.parent,
        "job": job.id if job else "",
        "rank": job.rank if job else None,
        "ranks": job.size if job else None,
    }


def _prepared(session: Session) -> ProgressView | None:
    """Return the progress of that compilation, as ``progress`` in ``openapi.yaml``."""
    found = session.observed.awaited_compilation()
    if found is None:
        return None
    return {"verb": "prepare", "checkpoint": "", "done": found.done, "total": found.total}


def _shared(session: Session) -> SharedView | None:
    """Return the sessions with which it shares devices; None if a user suspended it.

    Not for ranks: they share with each other, and their reason describes how the job runs.
    """
    if not session.lease.scheduled or session.demand.hold is not None:
        return None
    return shared(session.tenant, session.core.allocator.allocators)


def memory_used(session: Session) -> int:
    """Return the bytes of its device that a session uses."""
    state, memory = session.device_state, session.device_state.memory
    if state.worker is None or state.worker.broken:
        return 0
    return min(memory.client.memory_used, memory.agent.memory_granted)


#: Fields of other users' sessions that are visible in a shared daemon: who uses how much.
_OUTLINE = {
    "id", "owner", "state", "tier", "device", "memory", "queued_for", "last_activity",
    "recoverable",
}  # fmt: skip
#: Fields that are null in such an outline, not blank.
_UNSAID = {
    "kernel_pid", "worker_pid", "queue_position", "expected_wait", "suspended_by", "suspended_at",
    "promised", "rank", "ranks",
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
    if session.core.state is State.FAILED:
        return reason
    if session.device_state.unrecoverable:
        reason = f"{reason} Not protected now: {session.snapshots.obstacle}"
    since = session.device_state.recovered_since
    if since is not None:
        reason = f"{reason} Recovered approximately since {timestamp(since)}."
    if session.hibernation.problem:
        reason = f"{reason} Cannot hibernate: {session.hibernation.problem}"
    if session.allowance.shortfall:
        reason = f"{reason} {session.allowance.shortfall}"
    return reason


def _migration(session: Session) -> MigrationView | None:
    """Return the last migration of a session, or None."""
    last = session.migrator.last
    return cast("MigrationView", asdict(last)) if last else None


def _exactness(session: Session) -> ExactnessView:
    """Return what is, or would be, approximate in a session."""
    state = session.device_state
    approximate, recovered = state.inexact_since(state.position), state.recovered_since
    return {
        "deterministic": session.preferences.deterministic,
        "approximate_since": timestamp(approximate) if approximate is not None else None,
        "recovered_since": timestamp(recovered) if recovered is not None else None,
        "diverged": state.memory.worker.diverged,
    }


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


def describe_device(allocator: DeviceAllocator, sessions: Sequence[SessionView]) -> DeviceView:
    """Return a device's entry in the reply to `Status`, given all sessions of the reply."""
    here = [each for each in sessions if each["device"] == allocator.device.id]
    view: DeviceView = {
        "id": allocator.device.id,
        "kind": allocator.device.kind.name.lower(),
        "name": allocator.device.name,
        "memory_total": allocator.device.memory_total,
        "memory_used": sum(each["memory"] for each in here),
        "sessions": [each["id"] for each in here],
        "failure": allocator.failure,
    }
    if allocator.measured.present:
        view["outside"] = _outside(allocator.measured)
    return view


def _outside(measured: MeasuredMemory) -> OutsideView:
    """Return the memory of a GPU that is in no storage; see Note [Charges]."""
    accounts = measured.accounts
    return {
        "memory": accounts.outside,
        "contexts": sum(each.beside for each in accounts.workers.values()),
        "complete": accounts.complete and measured.answers,
        "processes": [
            {"pid": each.pid, "user": each.user, "command": each.command, "memory": each.memory}
            for each in measured.outside
        ],
    }


def timestamp(monotonic: float) -> str:
    """Return a time of the monotonic clock in ISO 8601."""
    age = max(0.0, time.monotonic() - monotonic)
    return datetime.fromtimestamp(time.time() - age, UTC).isoformat(timespec="milliseconds")
