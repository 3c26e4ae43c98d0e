"""Hibernation of unused sessions: the device's state is spilled, and the process saved and ended.

| stage      | the kernel's process is                           | next stage                    |
|------------|---------------------------------------------------|-------------------------------|
| (none)     | running                                           |                               |
| `dumping`  | running, or ended once its images are complete:   | `asleep`, or none             |
|            | the process manager is at work                    |                               |
| `asleep`   | images alone; the session lives as long as the    | `reviving`                    |
|            | process manager does                              |                               |
| `reviving` | images, and perhaps a process already             | none, or the session ends     |

Every stage is persisted before it takes effect. If the agent or the connection to the process
manager is lost in the middle of a command, the outcome is known once the process manager has
reconnected, because it carries out one command at a time: see `consider`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Any

from kernelproxy.agent.process.image_dirs import COMPLETE, ImageDirs
from kernelproxy.agent.process.process_dump import dump
from kernelproxy.agent.process.process_manager import (
    GONE,
    NOT_SHARED,
    ProcessManagerConnection,
    ProcessManagerSlot,
)
from kernelproxy.agent.residency.spill import Spiller
from kernelproxy.agent.residency.suspend import Suspender
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.idle_timer import IdleTimer
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.process_watch import ProcessWatch, memory_bytes
from kernelproxy.common.errors import ControlError, InternalError, SingError
from kernelproxy.common.protocol import Done, HoldRequests, LetThrough, Revive, Revived
from kernelproxy.common.units import bytes_text

log = logging.getLogger(__name__)

#: Time limit for the kernel to finish the requests that it has received already.
HOLD_SECONDS = 2.0
ORDER_SECONDS = 30.0
#: The process manager has limits of its own, which depend on the size of the process.
REVIVE_SECONDS = 3600.0
REVIVE_ATTEMPTS = 2
JOIN_SECONDS = 30.0
#: Pause before the next attempt if hibernation failed.
RETRY_SECONDS = 60.0
_FORBIDDEN_BY = (
    Inhibitor.PIN,
    Inhibitor.CHECKPOINT_REQUEST,
    Inhibitor.AUTO_CHECKPOINT,
    Inhibitor.CHILDREN,
)
REASON = "Hibernated on disk. Resumes when you open the notebook or run a cell."


class HibernationStage(StrEnum):
    """Stages of a process on its way to disk and back."""

    DUMPING = "dumping"
    ASLEEP = "asleep"
    REVIVING = "reviving"


class Hibernation:
    """Hibernates one session, and wakes it.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    kernel : KernelConnection
    managers : ProcessManagerSlot
    suspender : Suspender
    spiller : Spiller
    idle : IdleTimer
        Its ``hibernate_after`` says when.
    directories : ImageDirs
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        kernel: KernelConnection,
        managers: ProcessManagerSlot,
        suspender: Suspender,
        spiller: Spiller,
        idle: IdleTimer,
        directories: ImageDirs,
    ) -> None:
        self.stage: HibernationStage | None = None
        #: Directory of the images, from `dumping` on.
        self.directory: Path | None = None
        self._core, self._state, self._kernel, self._managers = core, state, kernel, managers
        self._suspender, self._spiller, self._idle = suspender, spiller, idle
        self._directories = directories
        self._not_before = 0.0
        self._cells = 0  # that had ended when hibernation was decided
        self._under_way = False  # hibernation is under way
        self._requested = False
        self._ordering = False  # this object waits for a command about the process
        #: Why its process cannot be saved, if only a lack of disk space prevents it; or empty.
        self.problem = NOT_SHARED if core.shared and idle.hibernate_after > 0 else ""
        self._manager_watch: ProcessWatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._chores: set[asyncio.Task[None]] = set()
        core.inhibitors[Inhibitor.HIBERNATION] = lambda: self.asleep

    @property
    def asleep(self) -> bool:
        """True if there is no process, or might be none."""
        return self.stage in (HibernationStage.ASLEEP, HibernationStage.REVIVING)

    # ---------------------------------------------------------------- when

    def seconds_left(self) -> float:
        """Return the seconds until it should hibernate if it is not used meanwhile."""
        core = self._core
        if self._idle.hibernate_after <= 0 or self.stage is not None or self._under_way:
            return float("inf")
        if core.closing or core.inhibited(*_FORBIDDEN_BY):
            return float("inf")
        if core.state not in (State.IDLE, State.RUNNING, State.SUSPENDED):
            return float("inf")
        if not self._has_process() and not self._has_device():
            return float("inf")
        return max(self._seconds_till_due(), self._not_before - time.monotonic())

    def _seconds_till_due(self) -> float:
        now = time.monotonic()
        active = self._idle.active if self._state.idle else now
        return active + self._idle.hibernate_after - now

    def _has_process(self) -> bool:
        return self._managers.current is not None and self._kernel.joined

    def _has_device(self) -> bool:
        """Return True if its device's state could be spilled."""
        state = self._state
        can = state.snapshot is not None or state.worker is not None
        return can and not state.disk.alone and self._spiller.usable

    def set_timer(self) -> None:
        """Schedule the next check for when it should hibernate."""
        self._cancel_timer()
        left = self.seconds_left()
        if left != float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, 0.01), self._core.request_reconcile)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---------------------------------------------------------------- falling asleep

    def begin(self) -> None:
        """Start to hibernate, if it is time for that."""
        if self.seconds_left() <= 0:
            self._under_way = True
            self._requested = False
            self._cells = self._kernel.cells_ended
            self._spawn(self._hibernate())

    async def _hibernate(self) -> None:
        """Hibernate, if the session is not used meanwhile."""
        failed = True
        try:
            if self._has_process():
                failed = await self._with_process()
            else:
                async with self._core.exclusive():
                    failed = self._state.idle and await self._spill()
        finally:
            seconds = RETRY_SECONDS if failed else min(self._idle.hibernate_after, RETRY_SECONDS)
            self._not_before = time.monotonic() + seconds
            self._under_way = False
            self._core.request_reconcile()

    async def _with_process(self) -> bool:
        """Hibernate with its process; return True if that failed and may fail again."""
        core, manager = self._core, self._managers.current
        if manager is None:
            return True
        try:
            room = await asyncio.to_thread(self._spiller.disk_left)
            need = self._check_room(room, shared=False)
        except SingError as error:
            self._cannot(error)
            return True
        try:
            # Without the lock: the requests that the kernel still finishes may need its device.
            await manager.order(HoldRequests(HOLD_SECONDS), Done, HOLD_SECONDS + ORDER_SECONDS)
        except ControlError as error:
            log.info("Session %s does not hibernate: %s", core.id, error)
            return error.reason != "busy"
        async with core.exclusive():
            if self._is_used:  # its last request has begun a cell
                self._spawn(self._let_through())
                return False
            try:
                core.check_usable()
                await self._sleep(manager, need, room)
            except (SingError, OSError) as error:
                self._cannot(error)
                if self.stage is None:
                    self._spawn(self._let_through())
                    return getattr(error, "reason", "") != "busy"
            if self.stage is HibernationStage.ASLEEP and not self._requested:
                await self._spill()
                core.reason = REASON
                core.happened("swapped_out", REASON)
                core.persist()
        return False  # it has hibernated, though it may have been woken since

    def _cannot(self, error: Exception) -> None:
        """Log why it cannot hibernate; a lack of disk space only once."""
        lacks_room = getattr(error, "reason", "") == "quota"
        if not lacks_room or not self.problem:
            log.warning("Session %s could not hibernate: %s", self._core.id, error)
        self.problem = str(error) if lacks_room else ""

    def _check_room(self, room: int, *, shared: bool) -> int:
        """Return the bytes that the images may need on disk; raise if that exceeds `room` (bytes).

        How well they compress is not known before; once the process has ended it is too late.
        """
        need = memory_bytes(self._kernel.pid or 0, shared=shared)
        if need > room:
            raise ControlError(
                f"Its process may take {bytes_text(need)} on disk, and the quota has "
                f"{bytes_text(room)} left: delete checkpoints, or raise the quota.",
                "quota",
            )
        return need

    async def _sleep(self, manager: ProcessManagerConnection, need: int, room: int) -> None:
        """Save its process and end it; `need` and `room` on disk in bytes."""
        core, kernel = self._core, self._kernel
        if self._requested or not await self._suspender.suspend_if_idle("Hibernates"):
            raise ControlError("It has begun to work.", "busy")

        def check() -> None:
            self._check_unused()
            self._check_room(room, shared=True)  # the session's memory is detached now

        self.directory = await asyncio.to_thread(self._directories.make, core.id, need)
        self.stage, kernel.may_end, self._ordering = HibernationStage.DUMPING, True, True
        core.persist()
        try:
            await dump(manager, kernel, self.directory, leave_running=False, check=check)
        except ControlError:
            self._ordering = False
            if self._managers.current is manager:
                self._wake_up()
                self._spawn(kernel.await_return())
            else:
                self.consider()  # the outcome is known once the process manager has reconnected
            raise
        finally:
            self._ordering = False
        self._fall_asleep(manager)

    @property
    def _is_used(self) -> bool:
        """True if it was used, or is wanted, since hibernation was decided.

        A cell that has ended since then counts, however long ago: its effects were not saved.
        """
        has_run = self._kernel.cells_ended > self._cells
        requested = self._core.inhibited(Inhibitor.CHECKPOINT_REQUEST)
        return self._seconds_till_due() > 0 or has_run or requested

    def _check_unused(self) -> None:
        """Raise ControlError if it was used; called when the kernel has detached and sent all."""
        if self._is_used:
            raise ControlError("It has run a cell meanwhile.", "busy")
        if not (self._state.drained and self._state.saved):
            raise ControlError("Something used the device meanwhile.", "busy")

    def _fall_asleep(self, manager: ProcessManagerConnection) -> None:
        """Note that its process is saved in the images, and has ended."""
        core = self._core
        self._kernel.note_saved()
        self._watch_manager(ProcessWatch(manager.pid, self._manager_ended))
        self.stage, self.problem = HibernationStage.ASLEEP, ""
        core.reason = REASON
        core.persist()
        log.info("Session %s hibernates", core.id)
        if self._requested:
            self._spawn(self._try_wake())

    async def _spill(self) -> bool:
        """Spill the device's state, unless it is wanted; return True if that failed."""
        try:
            if self._state.worker is None or await self._suspender.suspend_if_idle(
                "Not used for long"
            ):
                await self._spiller.spill_locked()
        except SingError as error:
            log.warning("Session %s could not go to disk: %s", self._core.id, error)
            return True
        return False

    # ---------------------------------------------------------------- waking up

    def request_process(self) -> None:
        """Let a request through that waits for the kernel, or wake the kernel for it."""
        self._requested = True
        if self.stage is None:
            if not self._under_way:
                self._spawn(self._let_through())
        elif self.stage is HibernationStage.ASLEEP:
            self._spawn(self._try_wake())

    async def _try_wake(self) -> None:
        try:
            await self.wake()
        except SingError as error:
            log.warning("Session %s could not be woken: %s", self._core.id, error)

    async def wake(self) -> None:
        """Restore its process, if it hibernates; return when the kernel has reattached.

        Raises
        ------
        ControlError
            If that is impossible now, or for good: then the session has failed.
        """
        if self.stage is None:
            return
        self._requested = True  # the holder of the lock stops at the next safe point
        async with self._core.exclusive():
            self._core.check_usable()
            if self.stage is HibernationStage.ASLEEP:
                await self._revive()
            if self.stage is not None:
                raise ControlError(
                    "The notebook is hibernating or waking up: try again in a few seconds.", "busy"
                )
        await self._kernel.wait_joined(JOIN_SECONDS)

    async def _revive(self) -> None:
        core, manager, directory = self._core, self._managers.current, self.directory
        if manager is None or directory is None:
            raise ControlError(f"It hibernates, and {GONE}.", "unavailable")
        self._kernel.awaits_another, self._ordering = True, True
        self.stage = HibernationStage.REVIVING
        core.persist()
        order = Revive(str(directory), core.id, beside=False)
        try:
            for attempt in range(1, REVIVE_ATTEMPTS + 1):
                try:
                    revived = await manager.order(order, Revived, REVIVE_SECONDS)
                    break
                except ControlError as error:
                    if self._managers.current is not manager:
                        raise  # the outcome is known once the process manager has reconnected
                    log.warning("Session %s: attempt %d to wake: %s", core.id, attempt, error)
                    if attempt == REVIVE_ATTEMPTS:
                        why = f"It hibernated, and its kernel cannot come back: {error}"
                        core.fail(why)
                        manager.close()
                        raise ControlError(why, error.reason) from error
        finally:
            self._ordering = False
        self._kernel.take(revived.pid)
        self._wake_up()
        await self._let_through()

    def _wake_up(self) -> None:
        """Note that its process is running again."""
        core, directory = self._core, self.directory
        self._watch_manager(None)
        self.stage = self.directory = None
        self._requested = False
        self._kernel.may_end = False
        self._idle.note_use()
        if core.reason == REASON:
            core.reason = f"Back from hibernation. {self._suspender.way_back()}"
        core.persist()
        if directory is not None:
            self._spawn(asyncio.to_thread(self._directories.remove, directory))
        core.request_reconcile()

    async def _let_through(self) -> None:
        manager = self._managers.current
        if manager is not None:
            try:
                await manager.order(LetThrough(), Done, ORDER_SECONDS)
            except ControlError as error:  # it asks again when it has reconnected
                log.warning("Session %s: %s", self._core.id, error)

    # ---------------------------------------------------------------- events meanwhile

    def manager_connected(self, manager: ProcessManagerConnection) -> None:
        """Note that a process manager has connected; no command to an earlier one is under way."""
        if self.stage is not None:
            self._watch_manager(ProcessWatch(manager.pid, self._manager_ended))
            self._core.persist()
        elif not self._ordering:
            if not self._core.busy:
                self._kernel.wake()
            self._spawn(self._let_through())
        self.consider()
        self._core.request_reconcile()

    def consider(self) -> None:
        """Find out the outcome of a command whose reply was lost."""
        core, kernel, manager = self._core, self._kernel, self._managers.current
        if self._ordering or core.closing or manager is None:
            return
        if self.stage is HibernationStage.DUMPING:
            if kernel.joined:
                self._wake_up()
                self._spawn(self._let_through())
            elif not kernel.ended:
                kernel.wake()
            elif self.directory is not None and (self.directory / COMPLETE).exists():
                self._fall_asleep(manager)
            else:
                core.close("Its kernel ended.")
        elif self.stage is HibernationStage.REVIVING:
            if kernel.joined:
                self._wake_up()
                self._spawn(self._let_through())
            else:
                self.stage = HibernationStage.ASLEEP
                core.persist()
                self._spawn(self._try_wake())
        elif self.stage is HibernationStage.ASLEEP and self._requested:
            self._spawn(self._try_wake())

    def _manager_ended(self) -> None:
        if self.asleep:
            self._core.close("The server that ran its kernel has ended.")

    def _watch_manager(self, watch: ProcessWatch | None) -> None:
        before, self._manager_watch = self._manager_watch, watch
        if before is not None:
            before.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, InternalError):
            log.error("Session %s", self._core.id, exc_info=error)

    # ---------------------------------------------------------------- outliving the agent, its end

    def record(self) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """Return what `recover` needs: a JSON record, and named descriptors, which we still own."""
        watch = self._manager_watch
        pidfd = watch.pidfd if watch is not None else None
        directory = str(self.directory) if self.directory is not None else None
        record = {"stage": self.stage, "directory": directory}
        return record, [] if pidfd is None else [("tender", pidfd)]

    def recover(self, record: dict[str, Any], pidfd: int | None) -> None:
        """Recover from the record of an agent that died; takes ownership of `pidfd`.

        `pidfd` refers to the process manager's process.
        """
        self.stage = HibernationStage(record["stage"]) if record["stage"] else None
        self.directory = Path(record["directory"]) if record["directory"] else None
        if pidfd is not None:
            self._watch_manager(ProcessWatch(0, self._manager_ended, pidfd))
        elif self.asleep:
            self._manager_ended()

    async def close(self) -> None:
        """Cancel what is under way, and remove the images."""
        self._cancel_timer()
        self._watch_manager(None)
        for task in self._chores:
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        if self.directory is not None:
            await asyncio.to_thread(self._directories.remove, self.directory)
