"""Commands that users give a session, by shell, magic and REST: suspend, resume, migrate.

Note [Withdrawing]: a caller may disconnect, as an interrupted shell command does. A command that
only waits then (for the session's lock, or for a lease) is cancelled, and the session is as it was.
A command that has begun is carried out: a state is never left half saved or half migrated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from kernelproxy.agent.devices.device_allocator import Answer, Room
from kernelproxy.agent.session.states import State
from kernelproxy.agent.session.suspend_hold import Hold
from kernelproxy.agent.state.migration import migrate
from kernelproxy.agent.status import session_status
from kernelproxy.common.errors import ControlError, InternalError, WorkerError
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.readable import device_name
from kernelproxy.common.units import bytes_text

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session


class Verbs:
    """Carries out one command after the other, under the session's lock.

    Each command returns the session's description afterwards. It raises ControlError if the session
    has ended or is closing, or if the command cannot be carried out: then the session is unchanged.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Commands being carried out.
        self.running: set[asyncio.Task[SessionView]] = set()
        self._waiting: set[asyncio.Task[Any] | None] = set()  # that only wait: Note [Withdrawing]
        self._withdrawn: set[asyncio.Task[Any] | None] = set()
        self._resuming = 0  # number of `resume` commands that wait for a lease
        self._held: tuple[Hold, str] | None = None  # the hold that these ended, with its reason

    async def suspend(self, why: str, by: int, uid: int) -> SessionView:
        """Suspend it on request, whatever it does; return when its worker is gone.

        A running cell continues until it needs the device, and then waits; see Note [Holding].

        Parameters
        ----------
        why : str
            Who or what suspends it, as a clause; may be empty.
        by, uid : int
            Process id and user id of the caller, from its peer credentials.
        """
        why = why.rstrip(". ") or "Suspended on request"
        return await self._as_verb(self._suspend(why, by, uid))

    async def _suspend(self, why: str, by: int, uid: int) -> SessionView:
        session = self._session
        session.device_state.hurry()
        async with self._begun():
            session.check_usable()
            client = session.device_state.memory.client
            hold = Hold(
                by == session.kernel.pid,
                client.cell_changed_ns,
                client.head,
                in_cell=client.cells_running > 0,
                by=session.user if uid == session.owner else session_status.user_name(uid),
                at=time.time(),
            )
            try:
                await session.unload(unless_busy=False)
            except WorkerError as error:
                raise ControlError(f"Its state could not be saved: {error}", "failed") from error
            if session.hibernation.asleep:
                return session_status.describe_session(session)
            session.room.leave_queue(session)
            session.hold = hold
            session.suspended(
                f"{session_status.held(session, hold, why)} {session_status.way_back(session)}"
            )
            return session_status.describe_session(session)

    async def resume(self) -> SessionView:
        """Resume it; return when it is resident. It may have to wait for room first."""
        return await self._as_verb(self._resume())

    async def _resume(self) -> SessionView:
        session = self._session
        await session.hibernation.wake()
        session.device_state.hurry()
        async with self._begun():
            session.check_usable()
            if session.hold is not None:
                self._held = session.hold, session.reason
            session.hold = None
            session.returning.hurry()
            if session.device_state.worker is None:
                await session.returning.come_back()
            session.look()
        await self._leave_queue()
        if session.state is State.RESTORING:
            async with session.exclusive():
                pass  # its task holds the lock until the worker is there
        session.check_usable()
        if session.returning.obstacle:
            raise ControlError(session.returning.obstacle, "failed")
        return session_status.describe_session(session)

    async def _leave_queue(self) -> None:
        """Wait until it is not queued any more; if the caller withdraws, suspend it as before."""
        session = self._session
        self._resuming += 1
        try:
            while session.state is State.QUEUED and not session.returning.obstacle:
                loop = asyncio.get_running_loop()
                session.left_queue = session.left_queue or loop.create_future()
                with self._only_waiting():
                    await asyncio.shield(session.left_queue)
        except asyncio.CancelledError:
            if self._resuming == 1 and self._held is not None and not session.closing:
                await self._hold_again(*self._held)
            raise
        finally:
            self._resuming -= 1
            if not self._resuming:
                self._held = None

    async def _hold_again(self, hold: Hold, reason: str) -> None:
        """Restore the hold that `resume` ended, if the session still waits for a lease."""
        session = self._session
        with contextlib.suppress(InternalError):  # then the session has failed, with a reason
            async with session.exclusive():
                if session.state is State.QUEUED and session.device_state.worker is None:
                    session.hold = hold
                    session.returning.stand_back()
                    session.suspended(reason)

    async def migrate(self, room: Room, check: Callable[[], None] = lambda: None) -> SessionView:
        """Migrate it to another device while it continues to work; return when it is there.

        A session without a worker is only reassigned to the other device. `check` is called just
        before it is migrated; if it raises, the session stays where it is.
        """
        return await self._as_verb(self._migrate(room, check))

    async def _migrate(self, room: Room, check: Callable[[], None]) -> SessionView:
        session = self._session
        session.device_state.hurry()
        async with self._begun():
            session.check_usable()
            check()
            if room is not session.room:
                moved = f"Moved from {_name(session.room)} to {_name(room)}."
                if session.device_state.worker is None:
                    self._settle_in(room)
                else:
                    await self._move_to(room, check)
                session.chronicle.happened(session, "migrated", moved)
            session.look()
        return session_status.describe_session(session)

    async def _move_to(self, room: Room, check: Callable[[], None]) -> None:
        """Migrate its worker's state to a device, or leave it where it was."""
        session = self._session
        state, here = session.device_state, session.room

        def check_again() -> None:
            check()
            grant = here.ledger.of(session.id)
            if room.ledger.short(session.id, grant):
                raise ControlError(f"{_name(room)} has too little free memory.", "no-room")
            room.ledger.hold(session.id, grant)
            session.turn.pause()

        need = here.ledger.of(session.id)
        if await room.reserve(session, need, queued=True) is not Answer.GRANTED:
            raise ControlError(
                f"{_name(room)} has too little free memory: session {session.id} needs "
                f"{bytes_text(need)}.",
                "no-room",
            )
        try:
            zygote = await session.zygotes.get(session.python, session.kernel.torch_version)
            session.become(
                State.MIGRATING,
                f"Moving from {_name(here)} to {_name(room)}. Cells keep running.",
            )
            session.migration = await session.meanwhile(
                migrate(state, zygote, room.device, check_again, session.look)
            )
        except WorkerError as error:
            raise ControlError(
                f"Session {session.id} could not be moved and stays on {_name(here)}: {error}",
                "failed",
            ) from error
        finally:
            if state.device is room.device:
                self._settle_in(room)
            else:
                room.release(session)
                await session.turn.go_on()
            if session.state is State.MIGRATING:
                session.become(State.RUNNING, session_status.RUNNING)

    def _settle_in(self, room: Room) -> None:
        """Assign the session to a device."""
        session = self._session
        session.room.leave_queue(session)
        del session.room.tenants[session.id]
        session.room.release(session)
        session.room.decided(session)
        room.tenants[session.id] = session
        session.room = room
        session.deposit()
        session.chronicle.became(session)
        session.turn.pause(over=True)
        resident = session.device_state.worker is not None
        session.arbiter.moved(session.id, room.device.id, resident=resident)
        if session.device_state.device is not room.device:
            session.device_state.settle_on(room.device)
            session.device_state.memory.agent.ring()

    async def _as_verb(self, work: Coroutine[None, None, SessionView]) -> SessionView:
        """Run a command. If the session closes, the command ends.

        If the caller is cancelled, it ends only if it just waits: Note [Withdrawing].
        """
        session = self._session
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if session.closing:
                raise ControlError(f"Session {session.id} was closed.", "ended") from None
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
    async def _begun(self) -> AsyncIterator[None]:
        """Hold the session's lock; the command may be withdrawn until it has the lock."""
        async with contextlib.AsyncExitStack() as stack:
            with self._only_waiting():
                await stack.enter_async_context(self._session.exclusive())
            yield


def _name(room: Room) -> str:
    """Return the user-facing name of a device."""
    return device_name(room.device.id)
