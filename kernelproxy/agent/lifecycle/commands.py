"""Commands that users give a session, by shell, magic and REST: suspend, resume, migrate.

Note [Withdrawing]: a caller may disconnect, as an interrupted shell command does. A command that
only waits then (for the session's lock, or for a lease) is cancelled, and the session is as it was.
A command that has begun is carried out: a state is never left half saved or half migrated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.process.hibernation import Hibernation
from kernelproxy.agent.residency.migrate import Migrator
from kernelproxy.agent.residency.restore import Restorer
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.demand import WorkerDemand
from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import SuspendHold
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.common.protocol.views import SessionView


class Commands:
    """Carries out one command after the other, under the session's lock.

    Each command returns the session's description afterwards. It raises ControlError if the session
    has ended or is closing, or if the command cannot be carried out: then the session is unchanged.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    demand : WorkerDemand
    suspender : Suspender
    restorer : Restorer
    migrator : Migrator
    hibernation : Hibernation
    describe : callable
        Returns the session's description.
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        demand: WorkerDemand,
        suspender: Suspender,
        restorer: Restorer,
        migrator: Migrator,
        hibernation: Hibernation,
        describe: Callable[[], SessionView],
    ) -> None:
        self._core, self._state, self._demand = core, state, demand
        self._suspender, self._restorer, self._migrator = suspender, restorer, migrator
        self._hibernation, self._describe = hibernation, describe
        #: Commands being carried out.
        self.running: set[asyncio.Task[SessionView]] = set()
        self._waiting: set[asyncio.Task[Any] | None] = set()  # that only wait: Note [Withdrawing]
        self._withdrawn: set[asyncio.Task[Any] | None] = set()
        self._resuming = 0  # number of `resume` commands that wait for a lease
        self._held: tuple[SuspendHold, str] | None = (
            None  # the hold that these ended, with its reason
        )

    async def suspend(self, why: str, uid: int, *, by_kernel: bool) -> SessionView:
        """Suspend it on request, whatever it does; return when its worker is gone.

        A running cell continues until it needs the device, and then waits; see Note [Holding].

        Parameters
        ----------
        why : str
            Who or what suspends it, as a clause; may be empty.
        uid : int
            User id of the caller, from its peer credentials.
        by_kernel : bool
            True if the caller is the session's own kernel.
        """
        why = why.rstrip(". ") or "Suspended on request"
        return await self._as_command(self._suspend(why, uid, by_kernel))

    async def _suspend(self, why: str, uid: int, by_kernel: bool) -> SessionView:
        core, script = self._core, self._core.script
        self._state.expedite()
        async with self._locked():
            core.check_usable()
            user = core.user if uid == core.owner else reasons.user_name(uid)
            hold = self._demand.new_hold(by_kernel=by_kernel, by=user)
            try:
                await self._suspender.unload(unless_busy=False)
            except WorkerError as error:
                raise ControlError(f"Its state could not be saved: {error}", "failed") from error
            if not self._hibernation.asleep:
                core.allocator.leave_queue(core.tenant)
                self._demand.hold = hold
                held = reasons.held(hold, why, core.user, script=script)
                self._suspender.suspended(f"{held} {reasons.way_back(hold, script=script)}")
            return self._describe()

    async def resume(self) -> SessionView:
        """Resume it; return when it is resident. It may have to wait for room first."""
        return await self._as_command(self._resume())

    async def _resume(self) -> SessionView:
        core, demand = self._core, self._demand
        await self._hibernation.wake()
        self._state.expedite()
        async with self._locked():
            core.check_usable()
            if demand.hold is not None:
                self._held = demand.hold, core.reason
            demand.hold = None
            await self._restorer.expedite()
            core.request_reconcile()
        await self._leave_queue()
        if core.state is State.RESTORING:
            async with core.exclusive():
                pass  # its task holds the lock until the worker is there
        core.check_usable()
        if demand.obstacle:
            raise ControlError(demand.obstacle, "failed")
        return self._describe()

    async def _leave_queue(self) -> None:
        """Wait until it is not queued any more; if the caller withdraws, suspend it as before."""
        core = self._core
        self._resuming += 1
        try:
            while core.state is State.QUEUED and not self._demand.obstacle:
                loop = asyncio.get_running_loop()
                core.left_queue = core.left_queue or loop.create_future()
                with self._only_waiting():
                    await asyncio.shield(core.left_queue)
        except asyncio.CancelledError:
            if self._resuming == 1 and self._held is not None and not core.closing:
                await self._hold_again(*self._held)
            raise
        finally:
            self._resuming -= 1
            if not self._resuming:
                self._held = None

    async def _hold_again(self, hold: SuspendHold, reason: str) -> None:
        """Restore the hold that `resume` ended, if the session still waits for a lease."""
        core = self._core
        with contextlib.suppress(InternalError):  # then the session has failed, with a reason
            async with core.exclusive():
                if core.state is State.QUEUED and self._state.worker is None:
                    self._demand.hold = hold
                    self._restorer.stand_back()
                    self._suspender.suspended(reason)

    async def migrate(
        self, allocator: DeviceAllocator, check: Callable[[], None] = lambda: None
    ) -> SessionView:
        """Migrate it to another device while it continues to work; return when it is there.

        `check`: see `Migrator.migrate`.
        """
        return await self._as_command(self._migrate(allocator, check))

    async def _migrate(self, allocator: DeviceAllocator, check: Callable[[], None]) -> SessionView:
        core = self._core
        self._state.expedite(allocator.device)
        async with self._locked():
            core.check_usable()
            check()
            await self._migrator.migrate(allocator, check)
            core.request_reconcile()
        return self._describe()

    async def prepare(self, allocator: DeviceAllocator) -> SessionView:
        """Prepare a migration that is expected soon, while it continues to work."""
        return await self._as_command(self._prepare(allocator))

    async def _prepare(self, allocator: DeviceAllocator) -> SessionView:
        async with self._locked():
            self._core.check_usable()
            await self._migrator.prepare(allocator)
            self._core.request_reconcile()
        return self._describe()

    async def _as_command(self, work: Coroutine[None, None, SessionView]) -> SessionView:
        """Run a command. If the session closes, the command ends.

        If the caller is cancelled, it ends only if it just waits: Note [Withdrawing].
        """
        core = self._core
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if core.closing:
                raise ControlError(f"Session {core.id} was closed.", "ended") from None
            self._withdrawn.add(task)
            task.add_done_callback(self._withdrawn.discard)
            if task in self._waiting:
                task.cancel()
                await asyncio.wait({task})
            raise

    @contextlib.contextmanager
    def _only_waiting(self) -> Iterator[None]:
        """Mark the running command as one that may be withdrawn; end it if it was already."""
        task = asyncio.current_task()
        if task in self._withdrawn:
            raise asyncio.CancelledError
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the session's lock; the command may be withdrawn until it has the lock."""
        async with contextlib.AsyncExitStack() as stack:
            with self._only_waiting():
                await stack.enter_async_context(self._core.exclusive())
            yield
