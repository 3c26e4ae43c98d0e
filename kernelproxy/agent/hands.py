"""What the agent does for its arbiter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING

from kernelproxy.agent.arbiter import Allowance, Arbiter
from kernelproxy.agent.room import Room
from kernelproxy.errors import SingError

if TYPE_CHECKING:
    from kernelproxy.agent.session import Session

log = logging.getLogger(__name__)


class AgentHands:
    """Carries out what an arbiter decides; see `Hands`.

    Parameters
    ----------
    arbiter : Arbiter
        Is told how it went.
    sessions : mapping
        By id; those that there are.
    rooms : mapping
        By id of the device.
    """

    def __init__(
        self, arbiter: Arbiter, sessions: Mapping[str, Session], rooms: Mapping[str, Room]
    ) -> None:
        self._arbiter, self._sessions, self._rooms = arbiter, sessions, rooms
        self._tasks: set[asyncio.Task[None]] = set()

    def grant(self, session: str, device: str, token: int) -> None:
        """See `Hands`."""
        found = self._sessions.get(session)
        if found is None:
            return
        here = found.room.device.id == device
        found.turn.bring(away=not here or found.device_state.worker is None)
        if here:
            found.turn.grant(token)
        else:
            self._begin(self._move(found, device, token))

    async def _move(self, session: Session, device: str, token: int) -> None:
        try:
            await session.verbs.migrate(self._rooms[device])
        except SingError as error:
            self._arbiter.failed(session.id, device, "grant", token, str(error))
            return
        session.turn.grant(token)

    def preempt(self, session: str, token: int, within: float = 0.0) -> None:
        """See `Hands`."""
        if found := self._sessions.get(session):
            found.turn.preempt(token, within)

    def evict(self, session: str, reason: str) -> None:
        """See `Hands`."""
        if found := self._sessions.get(session):
            self._begin(self._evict(found, reason))

    async def _evict(self, session: Session, reason: str) -> None:
        device = session.room.device.id
        try:
            if await session.evict(reason):
                return  # it has said so itself
            why = "It is pinned." if session.wanted.pinned else "It works."
        except SingError as error:
            why = str(error)
        self._arbiter.failed(session.id, device, "evict", 0, why)

    def migrate(self, session: str, device: str) -> None:
        """See `Hands`."""
        if found := self._sessions.get(session):
            self._begin(self._migrate(found, device))

    async def _migrate(self, session: Session, device: str) -> None:
        if session.wanted.pinned:
            self._arbiter.failed(session.id, device, "migrate", 0, "It is pinned.")
            return
        try:
            await session.verbs.migrate(self._rooms[device])
        except SingError as error:
            self._arbiter.failed(session.id, device, "migrate", 0, str(error))

    def explain(self, session: str, reason: str) -> None:
        """See `Hands`."""
        found = self._sessions.get(session)
        if found and found.turn.reason != reason:
            found.turn.reason = reason
            found.look()

    def allow(self, session: str, allowance: Allowance) -> None:
        """See `Hands`."""
        if found := self._sessions.get(session):
            found.allow(allowance)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("What was decided could not be done", exc_info=error)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
