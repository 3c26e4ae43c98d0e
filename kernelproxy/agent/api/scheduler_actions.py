"""Executor of the scheduler's decisions.

Note [Answers]: the scheduler waits for the answer to each of its decisions, and reserves devices
for it meanwhile. So everything that is begun here ends with an answer. What succeeds reports that
itself. What fails, for whatever reason, is answered by `refused` (a grant) or `stayed` (an eviction
or a migration). A session that is closed has no answers left to give.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.scheduler_api import Allowance, Arbiter

log = logging.getLogger(__name__)


class SchedulerActions:
    """Carries out the scheduler's decisions; see `Actions`.

    Parameters
    ----------
    arbiter : Arbiter
        The scheduler; receives the outcome of each decision.
    sessions : mapping
        All sessions, by id.
    allocators : mapping
        All devices, by id.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        sessions: Mapping[str, Session],
        allocators: Mapping[str, DeviceAllocator],
    ) -> None:
        self._arbiter, self._sessions, self._allocators = arbiter, sessions, allocators
        self._tasks: set[asyncio.Task[None]] = set()

    def grant(self, session: str, device: str, token: int) -> None:
        """See `Actions`."""
        found = self._sessions.get(session)
        if found is None:
            return
        here = found.core.allocator.device.id == device
        found.lease.begin_transfer(needed=not here or found.device_state.worker is None)
        if here:
            found.lease.grant(token)
            return

        def refuse(why: str) -> None:
            found.lease.withdraw(token)
            self._arbiter.refused(session, token, why)
            found.core.request_reconcile()  # it may have nothing to wait for any more

        found.lease.reserve(token, device)
        self._begin(self._bring(found, device, token), refuse)

    async def _bring(self, session: Session, device: str, token: int) -> None:
        def check() -> None:
            if not session.lease.is_reserved(token):
                raise ControlError("Its turn was over before it was there.")
            if session.preferences.pinned:
                raise ControlError("It is pinned.")

        await session.commands.migrate(self._allocators[device], check)
        if not session.lease.is_reserved(token):
            raise ControlError("Its turn was over when it was there.")
        session.lease.grant(token)

    def preempt(self, session: str, token: int, within: float = 0.0) -> None:
        """See `Actions`."""
        if found := self._sessions.get(session):
            found.lease.preempt(token, within)

    def evict(self, session: str, device: str, reason: str) -> None:
        """See `Actions`."""
        if found := self._sessions.get(session):
            stay = functools.partial(self._arbiter.stayed, session, device)
            self._begin(self._evict(found, device, reason), stay)

    async def _evict(self, session: Session, device: str, reason: str) -> None:
        if not await session.tenant.evict(device, reason):  # otherwise the session has reported it
            pinned = "It is pinned." if session.preferences.pinned else ""
            raise ControlError(pinned or session.observed.suspend_failure or "It is in use.")

    def leave(self, allocator: DeviceAllocator) -> None:
        """Take all sessions off a device that failed; they continue elsewhere, or wait.

        The scheduler knows that it failed. A session that it has granted another device by then
        migrates there, if its state can still be copied.
        """
        for session in self._sessions.values():
            if session.core.allocator is allocator and not self._arbiter.keeps:
                session.lease.give_up()
                stays = functools.partial(log.warning, "Session %s stays: %s", session.id)
                device = allocator.device.id
                self._begin(self._evict(session, device, allocator.failure.rstrip(".")), stays)

    def migrate(self, session: str, source: str, target: str) -> None:
        """See `Actions`."""
        if found := self._sessions.get(session):
            stay = functools.partial(self._arbiter.stayed, session, source)
            self._begin(self._migrate(found, source, target), stay)

    async def _migrate(self, session: Session, source: str, target: str) -> None:
        def check() -> None:
            if session.preferences.pinned:
                raise ControlError("It is pinned.")
            if session.core.allocator.device.id != source:
                raise ControlError(f"It is on {session.core.allocator.device.id}.")

        await session.commands.migrate(self._allocators[target], check)

    def prepare(self, session: str, device: str) -> None:
        """See `Actions`."""
        if found := self._sessions.get(session):
            failed = functools.partial(log.info, "Session %s is not prepared: %s", session)
            self._begin(self._prepare(found, device), failed)

    async def _prepare(self, session: Session, device: str) -> None:
        await session.commands.prepare(self._allocators[device])

    def explain(self, session: str, reason: str) -> None:
        """See `Actions`."""
        found = self._sessions.get(session)
        if found and found.lease.reason != reason:
            found.lease.reason = reason
            found.core.request_reconcile()

    def describe(self, session: str, sentence: str) -> None:
        """See `Actions`."""
        found = self._sessions.get(session)
        if found and found.lease.manner != sentence:
            found.lease.manner = sentence
            found.core.request_reconcile()

    def allow(self, session: str, allowance: Allowance) -> None:
        """See `Actions`."""
        if found := self._sessions.get(session):
            found.allow(allowance)

    def _begin(self, work: Coroutine[None, None, None], answer: Callable[[str], object]) -> None:
        """Start a task; if it fails, answer with the reason: Note [Answers]."""
        task = asyncio.create_task(self._carry_out(work, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(
        self, work: Coroutine[None, None, None], answer: Callable[[str], object]
    ) -> None:
        try:
            await work
        except SingError as error:
            answer(str(error))
        except Exception as error:
            log.exception("What was decided could not be done")
            answer(f"Something is wrong with jupyter_sing itself: {error}")

    async def close(self) -> None:
        """Cancel all running tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
