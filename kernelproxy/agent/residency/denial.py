"""Denial of devices: if a session's user may use no device, its client gets an error instead of
waiting forever.

Its pending requests stay in its log, and its state is kept. As soon as its user is admitted, the
session continues where it stopped.
"""

from __future__ import annotations

from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.scheduler_api import Arbiter
from kernelproxy.common.shared_memory import Presence


class Denial:
    """Denies devices to one session, and ends the denial. Called under the session's lock.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    suspender : Suspender
    arbiter : Arbiter
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        suspender: Suspender,
        arbiter: Arbiter,
    ) -> None:
        self._core, self._state, self._demand = core, state, demand
        self._suspender, self._arbiter = suspender, arbiter
        #: Reason for the denial, as a sentence; empty if it is not denied.
        self.why = ""

    def due(self) -> str:
        """Return why its user may use no device now; "" if they may."""
        return self._arbiter.admits(self._core.user)

    async def deny(self, why: str) -> None:
        """Make what its client runs raise `why`, and free its device memory."""
        self.why = why
        self._demand.needed = False
        self._demand.hold_until_next_cell()
        if self._state.worker is not None:
            await self._suspender.suspend_if_idle(why.rstrip("."))
        if self._state.worker is None:
            self._core.set_state(State.SUSPENDED, why)
        self._state.announce(Presence.ENDED, why)
        self._core.persist()

    def review(self) -> None:
        """End the denial if its user may use devices now."""
        if self.why and not self.due():
            self.why, self._demand.hold = "", None
            self._state.announce(Presence.ABSENT)
            self._core.persist()
