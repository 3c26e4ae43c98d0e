"""Making checkpoints of a session's notebook: the kernel captures, the agent saves and stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kernelproxy.agent.checkpoint.auto_checkpoint import AutoCheckpoint
from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.checkpoint.checkpoint_requests import CheckpointRequests
from kernelproxy.agent.checkpoint.parts import DeviceSide, HostState, ProcessSide
from kernelproxy.agent.checkpoint.process_saver import USED_MEANWHILE, ProcessSaver
from kernelproxy.agent.checkpoint.progress import PROGRESS_SECONDS, Note, both, with_progress
from kernelproxy.agent.residency.memory_requests import MemoryRequests
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import (
    Checkpoint,
    CheckpointBegun,
    Progress,
)
from kernelproxy.common.protocol.views import CheckpointView
from kernelproxy.common.readable import quoted
from kernelproxy.storage.manifest import Manifest
from kernelproxy.storage.threads import Cancel


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn a failure into the refusal of a request."""
    try:
        yield
    except ControlError:
        raise
    except (SingError, OSError) as error:  # or the kernel was interrupted, and disconnected
        raise ControlError(str(error), getattr(error, "reason", "failed")) from error


class CheckpointMaker:
    """Makes checkpoints of one session.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    memory : MemoryRequests
    saver : ProcessSaver
    checkpoints : CheckpointCatalog
    requests : CheckpointRequests
    automatic : AutoCheckpoint
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        memory: MemoryRequests,
        saver: ProcessSaver,
        checkpoints: CheckpointCatalog,
        requests: CheckpointRequests,
        automatic: AutoCheckpoint,
    ) -> None:
        self._core, self._state, self._memory, self._saver = core, state, memory, saver
        self._checkpoints, self._requests, self._automatic = checkpoints, requests, automatic
        self._last: Manifest | None = None
        #: The newest checkpoint that the kernel has handed over: its name and its outcome.
        self._newest: tuple[str, asyncio.Future[Mapping[str, Any]]] | None = None

    def continue_from(self, manifest: Manifest) -> None:
        """Remember the checkpoint from which its process was restored."""
        self._last = manifest

    async def make(
        self, request: Checkpoint, fds: Sequence[int], channel: Channel
    ) -> CheckpointView:
        """Store what the kernel has captured, with the device's state of the same moment.

        Parameters
        ----------
        request : Checkpoint
            From the kernel.
        fds : sequence of int
            Host state, and contents of files; the caller keeps ownership.
        channel : Channel
            Where `CheckpointBegun` is sent.

        Raises
        ------
        ControlError
            If it cannot be made; its reason is that of the `StoreError`, if there was one.
        """
        name = self._checkpoints.name(request.name, self._core.name)
        stored = self._automatic.note_started(name, by_itself=request.automatic)
        outcome: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._newest = name, outcome
        try:
            sizes = [os.fstat(fd).st_size for fd in fds]
            host = HostState.parse(request.host or {}, *sizes)
            if self._core.shared:
                self._checkpoints.check_size(host)
            async with self._core.exclusive():
                with _refusals():  # such failures do not fail the session
                    made = await self._make(name, request, host, fds, channel)
        except ControlError as refusal:
            outcome.set_exception(refusal)
            outcome.exception()  # mark it as retrieved: perhaps no caller follows it
            self._requests.settle(("checkpoint", name), refusal)
            raise
        except BaseException:
            outcome.cancel()
            raise
        stored()
        what = "Saved automatic checkpoint" if request.automatic else "Saved checkpoint"
        self._core.happened("checkpoint", f"{what} {name}.")
        outcome.set_result(made)
        self._requests.settle(("checkpoint", name), made)
        return made

    async def follow(self, name: str, channel: Channel) -> CheckpointView:
        """Wait for a checkpoint that the kernel has handed over before it detached.

        Parameters
        ----------
        name : str
            As the kernel asked for it; "": the newest.
        channel : Channel
            Where `Progress` is sent.

        Raises
        ------
        ControlError
            If it could not be made, or the daemon was replaced meanwhile.
        """
        if self._newest is None or name not in ("", self._newest[0]):
            raise ControlError(
                f"The checkpoint {quoted(name)} was not made: the daemon was replaced.", "ended"
            )
        name, outcome = self._newest
        while not (await asyncio.wait({outcome}, timeout=PROGRESS_SECONDS))[0]:
            await channel.send(Progress(*self._requests.underway.far("checkpoint", name)))
        if outcome.cancelled():
            raise ControlError("The session has ended.", "ended")
        return cast("CheckpointView", outcome.result())

    async def _make(
        self, name: str, request: Checkpoint, host: HostState, fds: Sequence[int], channel: Channel
    ) -> CheckpointView:
        core, state, saver, cancel = self._core, self._state, self._saver, Cancel()
        core.check_usable()
        saves = saver.wanted(request.form)
        sending: list[asyncio.Task[None]] = []

        def frozen() -> None:
            sending.append(asyncio.create_task(channel.send(CheckpointBegun())))

        if host.storages or (saves and state.memory.client.head):
            # A worker sends an answer before it has counted the operator as executed.
            if state.worker is not None and not (state.drained and state.saved):
                try:
                    await self._memory.run_granting(state.save(frozen=None if saves else frozen))
                finally:
                    await asyncio.gather(*sending)
            if host.storages and state.position != host.position:
                raise ControlError(USED_MEANWHILE, "busy")
        process, omitted = None, []
        directory: Path | None = None
        cut, announced = saver.cut(), bool(sending)

        async def begin() -> None:
            nonlocal announced
            announced = True
            with contextlib.suppress(OSError):  # it has disconnected already
                await channel.send(CheckpointBegun(True, name))

        try:
            if saves:
                try:
                    directory = await saver.make_directory()
                    process = await self._memory.run_granting(
                        saver.save(directory, cut, channel, begin)
                    )
                except (SingError, OSError) as error:
                    if request.form == "process" or core.closing:
                        raise
                    omitted = [{"name": "the process", "why": str(error), "partly": False}]
            if not announced:
                await channel.send(CheckpointBegun())
            return await self._store(name, request, host, fds, channel, process, omitted, cancel)
        finally:
            await cut.close()
            if directory is not None:
                await saver.remove(directory)

    async def _store(
        self,
        name: str,
        request: Checkpoint,
        host: HostState,
        fds: Sequence[int],
        channel: Channel,
        process: ProcessSide | None,
        omitted: list[dict[str, Any]],
        cancel: Cancel,
    ) -> CheckpointView:
        core, state = self._core, self._state
        resisting, left_out = host.about["omitted"], [*host.about["left_out"], *omitted]
        about = {
            "saved": host.about["saved"],
            # The process has what the namespace form cannot hold.
            "omitted": [*resisting, *left_out] if process is None else left_out,
            "only_process": [] if process is None else resisting,
        }
        label = self._checkpoints.label(
            core.owner,
            name,
            self._saver.torch_version,
            state.device.kind.name.lower(),
            state.position,
            {
                "session": core.name,
                "user": core.user,
                "run": core.id,
                "kernel_id": core.kernel_id,
                "notebook": core.notebook,
                "automatic": request.automatic,
                "forms": ["namespace"] if process is None else ["namespace", "process"],
                "device": state.device.id,
                **about,
            },
        )
        device = DeviceSide(
            state.snapshot if host.storages or process is not None else None,
            state.memory.arena_fd,
            state.disk.stored if state.disk.alone else self._last or state.disk.stored,
            self._last,
        )

        with self._requests.underway.doing("checkpoint", name) as far:

            def put(note: Note) -> Awaitable[tuple[CheckpointView, Manifest]]:
                return self._checkpoints.put(
                    core.owner, label, host, fds, device, process, cancel, both(far, note)
                )

            made, self._last = await self._memory.run_granting(with_progress(channel, cancel, put))
        return made
