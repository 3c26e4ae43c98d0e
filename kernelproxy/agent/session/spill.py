"""Spilling of a suspended session to disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernelproxy.agent.session.states import State
from kernelproxy.agent.spill.spill_policy import Parked
from kernelproxy.agent.status import session_status
from kernelproxy.common.errors import StoreError

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session


class Chilling:
    """A session as `spill.host_memory` sees it; its methods are those of `Guest`.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self.id = session.id
        self._session = session

    @property
    def user(self) -> str:
        """See `Guest`."""
        return self._session.user

    @property
    def host_bytes(self) -> int:
        """See `Guest`."""
        return self._session.device_state.host_bytes

    @property
    def undecided(self) -> bool:
        """See `Guest`."""
        return bool(self._session.claims)

    def as_parked(self) -> Parked | None:
        """See `Guest`."""
        session = self._session
        state = session.device_state
        parked = session.state is State.SUSPENDED and state.worker is None and state.snapshot
        if not parked or state.disk.alone or session.claims or session.closing:
            return None
        return Parked(session.id, state.memory.arena_bytes(), session.idleness.active)

    async def chill(self) -> bool:
        """See `Guest`."""
        if self._session.claims:
            return False
        async with self._session.exclusive():
            try:
                return await self.chill_held()
            except (StoreError, OSError) as error:
                problem = error  # of the disk, not of the session
        raise problem

    async def chill_held(self) -> bool:
        """Do the same as `chill`; the caller holds the session's lock."""
        session = self._session
        state = session.device_state
        suspended = session.state is State.SUSPENDED and state.worker is None
        if not suspended or state.snapshot is None or state.disk.alone or session.closing:
            return False
        cold = session.host.cold
        label = cold.label(
            session.id,
            session.name,
            session.owner,
            session.user,
            session.kernel.torch_version or "",
            state.device.kind.name.lower(),
            state.position,
        )
        storing = state.store(cold, label)
        try:
            while not (storing.task.done() or session.awaited or session.wants_worker()):
                wish = asyncio.create_task(session.wishes.wait())
                await asyncio.wait({storing.task, wish}, return_when=asyncio.FIRST_COMPLETED)
                wish.cancel()
                session.wishes.clear()
        finally:
            await storing.end()
        error = storing.task.exception()
        if error is None:
            if not session.hibernation.asleep:  # its reason says more, and this may be persisted
                session.reason = f"Saved to disk. {session_status.way_back(session)}"
                session.chronicle.happened(session, "swapped_out", session.reason)
            await state.cool()
        session.look()
        if error is None or (isinstance(error, StoreError) and error.reason == "cancelled"):
            return error is None
        raise error
