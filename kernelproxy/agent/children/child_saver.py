"""Saving the session of one process that a kernel has started, while the kernel's is saved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from kernelproxy.agent.children.saved_child import ChildSide
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.job import JobMembership, JobRank
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.shared_memory import PAGE_BYTES
from kernelproxy.criu.process_tree import numbers

#: Time limit for a process to detach; it gives up by itself before that.
LEAVE_SECONDS = 30.0
#: Time limit for the device to execute what a process has sent to it.
SETTLE_SECONDS = 30.0
_POLL_SECONDS = 0.01


class ChildSaver:
    """Detaches the process of one session, and keeps its device state as it is meanwhile.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    kernel : KernelConnection
    memory : MemoryRequests
    membership : JobMembership
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        kernel: KernelConnection,
        memory: MemoryRequests,
        membership: JobMembership,
    ) -> None:
        self._core, self._state, self._kernel = core, state, kernel
        self._memory, self._membership = memory, membership
        self._wake_fd = -1

    @property
    def id(self) -> str:
        """Id of its session."""
        return self._core.id

    @property
    def pid(self) -> int:
        """Process id; 0 if it has not attached."""
        return self._kernel.pid or 0

    @property
    def job(self) -> JobRank | None:
        """Its place in a job; None: it is in none."""
        return self._membership.job

    @property
    def parent(self) -> str:
        """Id of the session of the process that has started it."""
        return self._core.request.parent

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the process in refusals; other failures become such."""
        try:
            yield
        except ControlError as error:
            raise ControlError(f"{self.name}: {error.message}", error.reason) from error
        except (SingError, OSError) as error:
            raise ControlError(f"{self.name}: {error}", "failed") from error

    @property
    def name(self) -> str:
        """Name of the process, for users."""
        return f"{self._core.name} (process {self.pid})"

    async def leave(self) -> None:
        """Make it detach.

        Raises
        ------
        ControlError
            If it does not; then it reattaches by itself.
        """
        with self._named():
            self._core.check_usable()
            self._wake_fd = await self._kernel.detach(LEAVE_SECONDS)

    def wake(self) -> None:
        """Make it reattach, if it has detached. Idempotent."""
        self._kernel.wake()

    async def settle(self) -> None:
        """Wait until the device has executed all that the detached process has sent to it.

        Raises
        ------
        ControlError
            If that takes too long, or its session ends.
        """
        with self._named():
            try:
                async with asyncio.timeout(SETTLE_SECONDS):
                    while not self._state.drained:
                        self._core.check_usable()
                        # There is no notification for a drained log.
                        await asyncio.sleep(_POLL_SECONDS)
            except TimeoutError:
                raise ControlError(
                    f"Its device has not executed everything within {SETTLE_SECONDS:g} s.", "busy"
                ) from None

    async def hold(self, ready: asyncio.Future[None], until: asyncio.Event) -> None:
        """Save the device state, and keep the snapshot until an event.

        Parameters
        ----------
        ready : Future
            Done when it is saved; fails if it cannot be.
        until : Event
        """
        try:
            async with self._core.exclusive():
                with self._named():
                    await self._save()
                ready.set_result(None)
                await self._memory.run_granting(until.wait())
        except SingError as error:  # an unexpected one has failed the session
            if not ready.done():
                ready.set_exception(error)
        finally:
            ready.cancel()

    async def _save(self) -> None:
        state = self._state
        self._core.check_usable()
        # A worker sends an answer before it has counted the operator as executed.
        if state.worker is not None and not (state.drained and state.saved):
            await self._memory.run_granting(state.save())
        self.check()

    def check(self) -> None:
        """Raise ControlError unless it is detached, and the snapshot has all that it did."""
        state = self._state
        with self._named():
            self._core.check_usable()
            if self._kernel.joined:
                raise ControlError("It has attached again.", "busy")
            if not state.drained or state.position != state.memory.client.head:
                raise ControlError("It has used the device meanwhile.", "busy")

    def side(self, depth: int) -> ChildSide:
        """Return its part of the checkpoint.

        Parameters
        ----------
        depth : int
            How deep the namespace of processes of its sandbox is nested.

        Raises
        ------
        ControlError
            If it cannot be saved.
        """
        self.check()
        core, state = self._core, self._state
        with self._named():
            pids = numbers(self.pid)
            if len(pids) != depth:
                raise ControlError("It is in a namespace of processes of its own.", "unavailable")
        memory = state.memory
        pages = b"".join(
            bytes(page.memory[:PAGE_BYTES]) for page in (memory.client, memory.worker, memory.agent)
        )
        about = {
            "session": core.id,
            "parent": self.parent,
            "pid": pids[-1],
            "wake_fd": self._wake_fd,
            "request": asdict(core.request),
            "torch": self._kernel.torch_version or "",
            "device": state.device.id,
            "position": state.position,
            "cells_before": self._kernel.cells_before,
            "continues": self._kernel.continues,
            "job": self._membership.record(),
            **state.lineage(),
        }
        stored = state.disk.stored if state.disk.alone else None
        return ChildSide(pages, state.snapshot, memory.arena_fd, stored, about)
