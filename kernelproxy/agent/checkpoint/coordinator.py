"""Making checkpoints of a session's notebook: the kernel captures, the agent saves and stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kernelproxy.agent.checkpoint.catalog import Checkpoints, DeviceSide, Host, ProcessSide
from kernelproxy.agent.process.image_dirs import ImageDirectories
from kernelproxy.agent.process.process_dump import dump
from kernelproxy.agent.process.process_manager import GONE, NOT_SHARED
from kernelproxy.agent.status.progress import PROGRESS_SECONDS, Note, Underway, both, with_progress
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.protocol import (
    FORMS,
    Carried,
    Checkpoint,
    CheckpointBegun,
    KernelRequest,
    Progress,
    Restore,
    Stay,
)
from kernelproxy.common.protocol.views import CheckpointView, RestoreView
from kernelproxy.common.readable import quoted
from kernelproxy.common.shared_memory import PAGE_BYTES
from kernelproxy.storage.manifest import Manifest, check_name
from kernelproxy.storage.threads import Cancel

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session

#: Time limit for a kernel to close its connection before it detaches.
HANG_UP_SECONDS = 30.0
_USED_MEANWHILE = "Another thread of the notebook used the device meanwhile: try again."


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn a failure into the refusal of a request."""
    try:
        yield
    except ControlError:
        raise
    except (SingError, OSError) as error:  # or the kernel was interrupted, and disconnected
        raise ControlError(str(error), getattr(error, "reason", "failed")) from error


class Checkpointing:
    """Makes checkpoints of one session.

    Parameters
    ----------
    session : Session
    checkpoints : Checkpoints
    images : ImageDirectories
        Where processes are dumped.
    """

    def __init__(
        self, session: Session, checkpoints: Checkpoints, images: ImageDirectories
    ) -> None:
        self._session, self._checkpoints, self._images = session, checkpoints, images
        self._last: Manifest | None = None
        self._asked: dict[tuple[str, str], asyncio.Future[Mapping[str, Any]]] = {}
        #: The newest checkpoint that the kernel has handed over: its name and its outcome.
        self._newest: tuple[str, asyncio.Future[Mapping[str, Any]]] | None = None
        #: Checkpoints that are being stored, or read, for the session.
        self.underway = Underway(session.changed)
        self._returning: asyncio.Task[None] | None = None
        self._askers: Counter[tuple[str, str]] = Counter()  # number of waiters of each request
        self._withdrawing: asyncio.Task[None] | None = None

    def goes_on_from(self, manifest: Manifest) -> None:
        """Remember the checkpoint from which its process was restored."""
        self._last = manifest

    @property
    def asked(self) -> bool:
        """True if the kernel is to do something between two cells.

        It may need the device for that: a session that a user suspended must resume for it
        (Note [Holding]).
        """
        return bool(self._asked)

    async def ask(self, request: Checkpoint, channel: Channel | None = None) -> CheckpointView:
        """Ask the kernel to make a checkpoint as soon as no cell runs; return when it is stored.

        Parameters
        ----------
        request : Checkpoint
            From a caller other than the kernel.
        channel : Channel, optional
            Where `Progress` is sent.

        Raises
        ------
        ControlError
            If there is no kernel, or it failed.
        StoreError
            ``name``.
        """
        name = self._checkpoints.name(request.name, self._session.name)
        check_name(name, "name")  # before the notebook is captured in vain
        wish = KernelRequest("checkpoint", name, request.automatic, request.form)
        made = await (self._ask(wish) if channel is None else self._telling(wish, channel))
        return cast("CheckpointView", made)

    async def restore(self, request: Restore, channel: Channel) -> RestoreView:
        """Ask the kernel to restore a checkpoint as soon as no cell runs; as `ask`."""
        await self._checkpoints.check(self._session.owner, request.name)
        outcome = await self._telling(
            KernelRequest("restore", request.name, form=request.form), channel
        )
        self._session.past.note_use()
        return cast("RestoreView", outcome)

    async def _telling(self, wish: KernelRequest, channel: Channel) -> Mapping[str, Any]:
        """Do as `_ask`, and report progress, which the kernel's own request makes known here."""
        far = self.underway.far
        return await with_progress(
            channel, None, lambda _: self._ask(wish), lambda: far(wish.verb, wish.name)
        )

    async def _ask(self, wish: KernelRequest) -> Mapping[str, Any]:
        if wish.form not in ("", *FORMS):
            raise ControlError(f"A form is {' or '.join(FORMS)}, not {wish.form!r}.", "bad-request")
        self._session.check_usable()
        await self._session.hibernation.wake()
        key = wish.verb, wish.name
        asked = self._asked.get(key)
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
            try:
                await self._session.kernel.send(wish)
            except ControlError as error:
                self._settle(key, error)
        self._askers[key] += 1
        try:
            return await asyncio.shield(asked)
        finally:
            self._askers[key] -= 1
            if not self._askers[key]:
                del self._askers[key]
                if not asked.done():  # all callers have gone
                    asked.cancel()
                    self._withdrawing = asyncio.create_task(self._withdraw(wish))

    async def _withdraw(self, wish: KernelRequest) -> None:
        """Withdraw a request from the kernel because no caller waits for it any more."""
        with contextlib.suppress(ControlError):
            await self._session.kernel.send(replace(wish, withdrawn=True))

    def carried(self, report: Carried) -> None:
        """Receive the outcome of a request from the kernel."""
        key = report.verb, report.name
        if report.problem:
            self._settle(key, ControlError(report.problem, "failed"))
        elif report.verb == "restore":
            self._settle(key, report.outcome)

    async def settled(self, verb: str, name: str, seconds: float) -> None:
        """Wait until a request to the kernel has its outcome, for at most so many seconds."""
        if (asked := self._asked.get((verb, name))) is not None:
            await asyncio.wait({asked}, timeout=seconds)

    def give_up(self, why: str) -> None:
        """Fail all pending requests to the kernel."""
        for key in list(self._asked):
            self._settle(key, ControlError(why, "ended"))

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
        name = self._checkpoints.name(request.name, self._session.name)
        stored = self._session.automatic.begun(name)
        outcome: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._newest = name, outcome
        try:
            sizes = [os.fstat(fd).st_size for fd in fds]
            host = Host.parse(request.host or {}, *sizes)
            if self._session.shared:
                self._checkpoints.check_size(host)
            async with self._session.exclusive():
                with _refusals():  # such failures do not fail the session
                    made = await self._make(name, request, host, fds, channel)
        except ControlError as refusal:
            outcome.set_exception(refusal)
            outcome.exception()  # mark it as retrieved: perhaps no caller follows it
            self._settle(("checkpoint", name), refusal)
            raise
        except BaseException:
            outcome.cancel()
            raise
        stored()
        what = "Saved automatic checkpoint" if request.automatic else "Saved checkpoint"
        self._session.chronicle.happened(self._session, "checkpoint", f"{what} {name}.")
        if not request.automatic:
            self._session.past.note_use()
        outcome.set_result(made)
        self._settle(("checkpoint", name), made)
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
            await channel.send(Progress(*self.underway.far("checkpoint", name)))
        if outcome.cancelled():
            raise ControlError("The session has ended.", "ended")
        return cast("CheckpointView", outcome.result())

    def _settle(self, key: tuple[str, str], outcome: Mapping[str, Any] | ControlError) -> None:
        asked = self._asked.get(key)
        if asked is None or asked.done():
            return
        if isinstance(outcome, ControlError):
            asked.set_exception(outcome)
            asked.exception()  # mark it as retrieved: perhaps no caller waits any more
        else:
            asked.set_result(outcome)

    async def _make(
        self, name: str, request: Checkpoint, host: Host, fds: Sequence[int], channel: Channel
    ) -> CheckpointView:
        session = self._session
        session.check_usable()
        state, cancel = session.device_state, Cancel()
        can = session.tender is not None and session.kernel.joined
        saves = can and request.form != "namespace"
        if request.form == "process" and not saves:
            gone = f"Its process cannot be saved: {GONE}."
            raise ControlError(NOT_SHARED if session.shared else gone, "unavailable")
        telling: list[asyncio.Task[None]] = []

        def frozen() -> None:
            telling.append(asyncio.create_task(channel.send(CheckpointBegun())))

        if host.storages or (saves and state.memory.client.head):
            if state.worker is not None and not state.saved:
                try:
                    await session.meanwhile(state.save(frozen=None if saves else frozen))
                finally:
                    await asyncio.gather(*telling)
            if host.storages and state.position != host.position:
                raise ControlError(_USED_MEANWHILE, "busy")
        process, omitted = None, []
        directory: Path | None = None
        try:
            if saves:
                try:
                    directory = await asyncio.to_thread(self._images.make, session.id)
                    process = await session.meanwhile(self._save_process(name, directory, channel))
                except (SingError, OSError) as error:
                    if request.form == "process" or session.closing:
                        raise
                    omitted = [{"name": "the process", "why": str(error), "partly": False}]
            elif not telling:
                await channel.send(CheckpointBegun())
            return await self._store(name, request, host, fds, channel, process, omitted, cancel)
        finally:
            if directory is not None:
                await asyncio.to_thread(self._images.remove, directory)

    async def _save_process(self, name: str, directory: Path, channel: Channel) -> ProcessSide:
        """Save the kernel's process, which then continues."""
        session, kernel = self._session, self._session.kernel
        pages: list[bytes] = []

        def check() -> None:
            state = session.device_state
            if not state.drained or state.position != state.memory.client.head:
                raise ControlError(_USED_MEANWHILE, "busy")
            memory = state.memory
            pages.extend(
                bytes(page.memory[:PAGE_BYTES])
                for page in (memory.client, memory.worker, memory.agent)
            )

        with contextlib.suppress(OSError):  # it has disconnected already
            await channel.send(CheckpointBegun(True, name))
        absences = kernel.absences
        try:
            await _hung_up(channel)
            seconds = await dump(session, directory, leave_running=True, check=check)
        finally:
            if kernel.absences != absences:
                self._returning = asyncio.create_task(kernel.come_back())
            else:
                with contextlib.suppress(ControlError):
                    await kernel.send(Stay())
        about = {
            "seconds": seconds,
            "python": session.python,
            "cells_before": kernel.cells_before,
            **session.device_state.lineage(),
        }
        return ProcessSide(directory, b"".join(pages), about)

    async def _store(
        self,
        name: str,
        request: Checkpoint,
        host: Host,
        fds: Sequence[int],
        channel: Channel,
        process: ProcessSide | None,
        omitted: list[dict[str, Any]],
        cancel: Cancel,
    ) -> CheckpointView:
        session, state = self._session, self._session.device_state
        resisting, left_out = host.about["omitted"], [*host.about["left_out"], *omitted]
        about = {
            "saved": host.about["saved"],
            # The process has what the namespace form cannot hold.
            "omitted": [*resisting, *left_out] if process is None else left_out,
            "only_process": [] if process is None else resisting,
        }
        label = self._checkpoints.label(
            session.owner,
            name,
            session.kernel.torch_version or "",
            state.device.kind.name.lower(),
            state.position,
            {
                "session": session.name,
                "user": session.user,
                "run": session.id,
                "kernel_id": session.kernel_id,
                "notebook": session.notebook,
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

        with self.underway.doing("checkpoint", name) as far:

            def put(note: Note) -> Awaitable[tuple[CheckpointView, Manifest]]:
                return self._checkpoints.put(
                    session.owner, label, host, fds, device, process, cancel, both(far, note)
                )

            made, self._last = await session.meanwhile(with_progress(channel, cancel, put))
        return made


async def _hung_up(channel: Channel) -> None:
    """Wait until a kernel that is to detach has closed its connection.

    Raises
    ------
    ControlError
        If it does not.
    """
    try:
        async with asyncio.timeout(HANG_UP_SECONDS):
            while True:
                _, fds = await channel.receive()
                close_fds(fds)
    except ConnectionError:
        return
    except TimeoutError:
        raise ControlError("The kernel does not leave.", "timeout") from None
