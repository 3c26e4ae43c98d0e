"""The state of a session with a worker, as its pages show it."""

from __future__ import annotations

import asyncio
import time

from kernelproxy.agent.devices.co_tenants import known_as
from kernelproxy.agent.lease.lease import DeviceLease
from kernelproxy.agent.residency.waiting import WaitReasons
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.session.states import TRAITS, State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.readable import device_name, moment
from kernelproxy.native.libraries import Compiling

#: Interval of polling the pages of a session that may execute: they change without a message.
POLL_SECONDS = 0.5


class ObservedState:
    """Derives one session's state from its pages. Only `update` changes anything.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    lease : DeviceLease
    waiting : WaitReasons
    idle : IdleTimer
    zygotes : Zygotes
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        lease: DeviceLease,
        waiting: WaitReasons,
        idle: IdleTimer,
        zygotes: Zygotes,
    ) -> None:
        #: Why the last attempt to suspend it failed; "" if it did not fail.
        self.suspend_failure = ""
        self._core, self._state, self._lease = core, state, lease
        self._waiting, self._idle, self._zygotes = waiting, idle, zygotes
        self._timer: asyncio.TimerHandle | None = None

    def update(self) -> None:
        """Enter the state that the pages show: running, idle or queued."""
        if not self._follows_pages:
            return
        state, reason = self.observed()
        if state is State.RUNNING:
            self.suspend_failure = ""  # nothing tries to suspend a session that works
        self._core.set_state(state, reason)

    @property
    def _follows_pages(self) -> bool:
        """True if the pages tell its state, and not what is being done with it."""
        state = self._core.state
        return self._state.worker is not None and (
            TRAITS[state].has_worker or state is State.QUEUED
        )

    def observed(self) -> tuple[State, str]:
        """Return the state that the pages show, and the reason for it."""
        if not self._follows_pages:
            return self._core.state, self._core.reason
        if self._lease.waiting and self._waiting.blocked():
            return State.QUEUED, self._waiting.why_queued()
        if self._state.idle:
            return State.IDLE, self._idle_reason()
        if self._lease.held or self._lease.waiting or not self._state.drained:
            return State.RUNNING, self._running_reason()
        # Its cell continues without the device, which others may use.
        return State.IDLE, reasons.ELSEWHERE

    def user_visible(self, *, asking: bool = False) -> tuple[State, str]:
        """Return the state to show, and the reason.

        In this package, a session that has asked for a lease is always queued. Users see it as
        queued only once it is known that others have what it waits for.

        Parameters
        ----------
        asking : bool
            True if its own cell asks for the state, which does not count as work.
        """
        if compiling := self.awaited_compilation():
            return State.PREPARING, f"{compiling}."
        state, reason = self.observed()
        if state is State.QUEUED and not self._waiting.blocked():
            return (
                State.RESTORING,
                reasons.RESTORED if self._state.position else reasons.STARTS,
            )
        if asking and state is State.RUNNING and self._state.rests_but_for_cells(1):
            return State.IDLE, self._idle_reason()
        return state, reason

    def awaited_compilation(self) -> Compiling | None:
        """Return what has to be compiled before a session without a worker can get one."""
        if self._state.worker is not None or not TRAITS[self._core.state].before_worker:
            return None
        return self._zygotes.compiling(self._core.python)

    def _running_reason(self) -> str:
        """Return a sentence about a session that executes, and about the sessions beside it."""
        if self._lease.manner:
            return f"{reasons.RUNNING} {self._lease.manner}"
        others = self._lease.monitor.company()
        if not others or not self._lease.scheduled:
            return reasons.RUNNING
        allocator = self._core.allocator
        names = " and ".join(
            known_as(self._core.tenant, allocator.tenants.get(each)) for each in others
        )
        device = device_name(allocator.device.id)
        return f"{reasons.RUNNING} Shares {device} with {names} as long as that is faster for both."

    def _idle_reason(self) -> str:
        """Return a sentence about a session that has nothing to do."""
        left = self._idle.seconds_left()
        if self._core.inhibited(Inhibitor.PIN):
            return reasons.PINNED
        if self.suspend_failure:
            return f"Idle, and stays on its device. {self.suspend_failure}"
        if left == float("inf"):
            return reasons.EVER_IDLE
        return f"Idle. Suspends at {moment(time.time() + left)}; nothing is lost."

    # ---------------------------------------------------------------- polling

    def set_timer(self) -> None:
        """Poll the pages as long as they may change without a message."""
        self.cancel()
        moves = self._lease.held or TRAITS[self._core.state].changes_unreported
        if moves and self._state.worker is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self.update()
        self.set_timer()

    def cancel(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
