"""Recorder of the activity of sessions and devices, for the record of the last day.

Sessions report their changes. Their device memory is polled: shortly after a change, and every few
seconds while a session executes. Nothing is done while no session executes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.states import TRAITS, State
from kernelproxy.agent.status import session_status
from kernelproxy.agent.status.activity_store import ENDED, ActivityStore
from kernelproxy.agent.status.timeline import Change
from kernelproxy.common.readable import device_name

#: Delay of polling memory after a change, and its interval while sessions execute.
SOON_SECONDS, POLL_SECONDS = 0.5, 5.0
#: An idle session that has no worker yet.
_UNUSED = "unused"


class ActivityRecorder:
    """Records the activity of all sessions.

    Parameters
    ----------
    sessions : mapping
        The present sessions, by id.
    allocators : mapping
        By id of the device.
    record : ActivityStore
        The recorder takes ownership.
    """

    def __init__(
        self,
        sessions: Mapping[str, Session],
        allocators: Mapping[str, DeviceAllocator],
        record: ActivityStore,
    ) -> None:
        self._sessions, self._allocators, self._record = sessions, allocators, record
        self._last: dict[str, tuple[str, str]] = {}
        self._suspended: set[str] = set()
        self._used: dict[str, int] = {}
        self._executed: dict[str, float] = {}  # seconds recorded so far, by session
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def begin(self, *, kept: bool) -> None:
        """Record that the daemon begins; see `ActivityStore.begin`."""
        devices = [
            (each.device.id, each.device.kind.name.lower(), each.device.memory_total)
            for each in self._allocators.values()
        ]
        self._record.begin(time.time(), devices, kept=kept)

    def taken_over(self) -> None:
        """See `ActivityStore.taken_over`."""
        self._record.taken_over()

    def opened(self, session: Session) -> None:
        """Record a new session."""
        core = session.core
        self._record.opened(core.id, core.owner, core.user, core.name)
        self.state_changed(session)

    def state_changed(self, session: Session, *, recovered: bool = False) -> None:
        """Record that a session is in another state, or on another device.

        `recovered`: it was already in that state under the previous agent, which has recorded it.
        """
        state, device = _state(session), session.core.allocator.device.id
        if self._last.get(session.id) == (device, state):
            return
        self.note_executed(session)
        self._last[session.id] = device, state
        self._record.changed(Change(time.time(), session.id, device, state))
        self._schedule_check(SOON_SECONDS)
        if state == State.SUSPENDED and session.id not in self._suspended:
            self._suspended.add(session.id)
            if not recovered:
                self.happened(session, "suspended", session.core.reason)
        elif state in (State.RUNNING, State.IDLE) and session.id in self._suspended:
            self._suspended.discard(session.id)
            self.happened(session, "resumed", f"Resumed on {device_name(device)}.")
        elif state == State.FAILED and not recovered:
            self.happened(session, "failed", session.core.reason)

    def happened(self, session: Session, kind: str, text: str) -> None:
        """Record an event of a session: a kind as in ``openapi.yaml``, and a sentence."""
        self._record.happened(time.time(), kind, session.id, session.core.allocator.device.id, text)

    def closed(self, session: Session) -> None:
        """Record that a session has ended and uses nothing any more."""
        device, _ = self._last.pop(session.id, (session.core.allocator.device.id, ""))
        self._executed.pop(session.id, None)
        self._suspended.discard(session.id)
        self._record.changed(Change(time.time(), session.id, device, ENDED))
        self._schedule_check(SOON_SECONDS)

    def _schedule_check(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        """Record the memory in use, and that the daemon is alive."""
        self._timer = None
        self._note_memory()
        if any(TRAITS[each.core.state].executes for each in self._sessions.values()):
            self._schedule_check(POLL_SECONDS)

    def note_executed(self, session: Session) -> None:
        """Record how long its workers have executed, on the device where it was until now."""
        if session.device_state.closed:
            return
        total = session.device_state.busy_seconds
        before = self._executed.get(session.id)
        if before is None and session.id not in self._last:
            before = total  # from an agent that died, which has recorded it
        self._executed[session.id] = total
        if (seconds := total - (before or 0.0)) > 0.0:
            device, _ = self._last.get(session.id, (session.core.allocator.device.id, ""))
            self._record.executed(time.time(), session.id, device, seconds)

    def _note_memory(self) -> None:
        now, used = time.time(), dict.fromkeys(self._allocators, 0)
        for each in self._sessions.values():
            if not each.device_state.closed:
                self.note_executed(each)
                used[each.core.allocator.device.id] += session_status.memory_used(each)
        for device, count in used.items():
            if self._used.get(device, 0) != count:
                self._used[device] = count
                self._record.used(now, device, count)
        self._record.alive(now)

    async def close(self) -> None:
        """Record that the daemon ends, and close the record."""
        if self._timer is not None:
            self._timer.cancel()
        self._note_memory()
        await asyncio.to_thread(self._record.close, time.time())


def _state(session: Session) -> str:
    """Return a session's state, as the record spells it."""
    state = session.observed.user_visible()[0]
    if session.device_state.worker is None and state in (State.IDLE, State.PREPARING):
        return _UNUSED
    return str(state)
