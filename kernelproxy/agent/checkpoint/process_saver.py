"""The process of a kernel as part of a checkpoint: saving it while the kernel continues.

With it are saved the processes that it has started, and their sessions: see Note [Cut].
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kernelproxy.agent.checkpoint.parts import ProcessSide
from kernelproxy.agent.children.child_saver import ChildSaver
from kernelproxy.agent.children.family_cut import FamilyCut
from kernelproxy.agent.process.image_dirs import ImageDirs
from kernelproxy.agent.process.process_dump import dump
from kernelproxy.agent.process.process_manager import GONE, NOT_SHARED, ProcessManagerSlot
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.session.job import JobMembership
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.protocol import Stay
from kernelproxy.common.shared_memory import PAGE_BYTES

#: Time limit for a kernel to close its connection before it detaches.
DISCONNECT_SECONDS = 30.0
USED_MEANWHILE = "Another thread of the notebook used the device meanwhile: try again."


class ProcessSaver:
    """Saves the process of one session's kernel.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    kernel : KernelConnection
    managers : ProcessManagerSlot
    images : ImageDirs
        Where processes are dumped.
    membership : JobMembership
    """

    #: Returns the sessions of processes that the kernel has started, parents before their children.
    find_children: Callable[[], Sequence[ChildSaver]] = staticmethod(list)

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        kernel: KernelConnection,
        managers: ProcessManagerSlot,
        images: ImageDirs,
        membership: JobMembership,
    ) -> None:
        self._core, self._state, self._kernel = core, state, kernel
        self._managers, self._images, self._membership = managers, images, membership
        self._returning: asyncio.Task[None] | None = None

    @property
    def torch_version(self) -> str:
        """Version of torch of the kernel; "" if it has not attached."""
        return self._kernel.torch_version or ""

    def wanted(self, form: str) -> bool:
        """Return True if a checkpoint of a form includes the process.

        Raises
        ------
        ControlError
            ``unavailable``, if it must and cannot.
        """
        can = self._managers.current is not None and self._kernel.joined
        saves = can and form != "namespace"
        if form == "process" and not saves:
            gone = f"Its process cannot be saved: {GONE}."
            raise ControlError(NOT_SHARED if self._core.shared else gone, "unavailable")
        return saves

    async def make_directory(self) -> Path:
        """Make a directory for the images; raises OSError."""
        return await asyncio.to_thread(self._images.make, self._core.id)

    async def remove(self, directory: Path) -> None:
        """Remove such a directory."""
        await asyncio.to_thread(self._images.remove, directory)

    def cut(self) -> FamilyCut:
        """Return the sessions of processes that the kernel has started, for `save`."""
        return FamilyCut(self.find_children)

    async def save(
        self,
        directory: Path,
        cut: FamilyCut,
        channel: Channel,
        begin: Callable[[], Awaitable[None]],
    ) -> ProcessSide:
        """Save the kernel's process, and those that it has started; they all continue then.

        Parameters
        ----------
        directory : Path
            An empty one, for the images.
        cut : FamilyCut
            Holds the device states that belong to them, until the caller closes it.
        channel : Channel
            The kernel's connection for this checkpoint.
        begin : callable
            Notifies the kernel that it is to detach.

        Raises
        ------
        ControlError
            If they cannot be saved.
        """
        try:
            await cut.begin(self._kernel.pid or 0, self._membership.job)
            return await self._save(directory, cut, channel, begin)
        finally:
            cut.wake()

    async def _save(
        self,
        directory: Path,
        cut: FamilyCut,
        channel: Channel,
        begin: Callable[[], Awaitable[None]],
    ) -> ProcessSide:
        kernel, state = self._kernel, self._state
        pages: list[bytes] = []

        def check() -> None:
            if not state.drained or state.position != state.memory.client.head:
                raise ControlError(USED_MEANWHILE, "busy")
            cut.check()
            memory = state.memory
            pages.extend(
                bytes(page.memory[:PAGE_BYTES])
                for page in (memory.client, memory.worker, memory.agent)
            )

        await begin()
        absences = kernel.absences
        try:
            await _wait_disconnected(channel)
            seconds = await dump(
                self._managers.current, kernel, directory, leave_running=True, check=check
            )
            children = cut.sides(kernel.pid or 0)
        finally:
            if kernel.absences != absences:
                self._returning = asyncio.create_task(kernel.await_return())
            else:
                with contextlib.suppress(ControlError):
                    await kernel.send(Stay())
        about = {
            "seconds": seconds,
            "python": self._core.python,
            "cells_before": kernel.cells_before,
            "continues": kernel.continues,
            **state.lineage(),
        }
        return ProcessSide(directory, b"".join(pages), about, children)


async def _wait_disconnected(channel: Channel) -> None:
    """Wait until a kernel that is to detach has closed its connection.

    Raises
    ------
    ControlError
        If it does not.
    """
    try:
        async with asyncio.timeout(DISCONNECT_SECONDS):
            while True:
                _, fds = await channel.receive()
                close_fds(fds)
    except ConnectionError:
        return
    except TimeoutError:
        raise ControlError("The kernel does not leave.", "timeout") from None
