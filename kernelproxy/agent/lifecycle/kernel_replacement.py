"""Replacement of a kernel by the process of a checkpoint.

The kernel asks for it. A new session is made in the state of the checkpoint's session: with its
pages, its log (which was empty), and its device state, which is on disk already and only gets a
manifest of its own; below it, sessions of the processes that the kernel had started. The process
manager restores the process beside the kernel's, with these processes, and each attaches to its new
session. Only then does the kernel get its reply. The process manager lets the new
process take the kernel's place as soon as the kernel has answered the request that it executes; the
kernel's session ends with its process.

Until the reply, a failure leaves the kernel and its session as they were. After it the kernel
executes nothing: so the process manager has promised before to continue even if the agent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.checkpoint.progress import Note, both
from kernelproxy.agent.children.saved_child import children_of
from kernelproxy.agent.lifecycle.saved_sessions import SavedSessions, wake_children
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.process.image_dirs import ImageDirs
from kernelproxy.agent.process.image_packing import holds_process, unpack
from kernelproxy.agent.process.process_manager import GONE, NOT_SHARED, ProcessManagerConnection
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.errors import ControlError, ProcessError, SingError
from kernelproxy.common.protocol import (
    CommitReplace,
    Done,
    LetThrough,
    Replace,
    Revive,
    Revived,
)
from kernelproxy.common.protocol.views import RestoreView
from kernelproxy.common.shared_memory import LAYOUT_VERSION
from kernelproxy.criu import images
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Manifest

log = logging.getLogger(__name__)

#: The process manager has limits of its own, which depend on the size of the process.
REVIVE_SECONDS = 3600.0
JOIN_SECONDS = 60.0
ORDER_SECONDS = 30.0
#: Time limit for the kernel to answer the request that asked for this; the process manager has its
#: own.
REPLACE_SECONDS = 86_400.0

#: Time limit for the kernel to report the outcome of a restore that was requested from outside.
CARRIED_SECONDS = 30.0


class KernelReplacement:
    """Replaces kernels by processes of checkpoints.

    Parameters
    ----------
    checkpoints : CheckpointCatalog
    directories : ImageDirs
    zygotes : Zygotes
    saved : SavedSessions
    """

    def __init__(
        self,
        checkpoints: CheckpointCatalog,
        directories: ImageDirs,
        zygotes: Zygotes,
        saved: SavedSessions,
    ) -> None:
        self._checkpoints, self._directories = checkpoints, directories
        self._zygotes, self._saved = zygotes, saved
        self._replaced: set[str] = set()  # sessions whose kernels are being replaced
        self._replacing: set[asyncio.Task[None]] = set()

    async def obstacle(self, session: Session, name: str) -> str | None:
        """Return why the process of a checkpoint cannot replace a kernel.

        Returns
        -------
        str or None
            A sentence; "" if the checkpoint has no process; None if it can, as far as known.

        Raises
        ------
        ControlError, StoreError
            If there is no such checkpoint, or it cannot be read.
        """
        _, manifest = await self._checkpoints.load(session.core.owner, name)
        if not holds_process(manifest):
            return ""
        try:
            await self._check(session, manifest)
        except ControlError as error:
            return error.message
        return None

    async def _check(self, session: Session, manifest: Manifest) -> None:
        """Raise ControlError ``unavailable`` if the replacement is known to be impossible."""
        why = ""
        label = manifest.label
        kind = session.core.allocator.device.kind.name.lower()
        if not holds_process(manifest):
            why = f"Checkpoint {label.name!r} has the variables, but not the process."
        elif session.core.shared:
            why = NOT_SHARED
        elif session.managers.current is None:
            why = f"A process cannot be restored here: {GONE}."
        elif session.id in self._replaced:
            why = "A process is taking this kernel's place already."
        elif label.meta["process"]["layout"] != LAYOUT_VERSION:
            why = "Its process is of another version of jupyter_sing."
        elif (used := _environments(manifest)) and label.device_kind != kind:
            why = f"Its process used a {label.device_kind} device, and this kernel's is {kind}."
        else:
            try:
                for python, torch in used:
                    await self._zygotes.get(python, torch)
            except SingError as error:
                why = str(error)
        if why:
            raise ControlError(why, "unavailable")

    async def take_over(self, session: Session, name: str, note: Note) -> RestoreView:
        """Replace a session's kernel by the process of a checkpoint.

        Parameters
        ----------
        session : Session
        name : str
        note : callable
            Called with the bytes of its images that were read or written, and in total, in any
            thread.

        Returns
        -------
        dict
            What was restored, see `RestoreReply`, once it runs.

        Raises
        ------
        ControlError, StoreError
            If that fails: then the kernel and its session are as they were.
        """
        session.core.check_usable()
        store, manifest = await self._checkpoints.load(session.core.owner, name)
        await self._check(session, manifest)
        manager = session.managers.current
        if manager is None:
            raise ControlError(f"A process cannot be restored here: {GONE}.", "unavailable")
        self._replaced.add(session.id)
        directory, new, revived = None, None, None
        try:
            directory = await asyncio.to_thread(self._directories.make, session.id)
            with (
                self._checkpoints.reading(session.core.owner, name),
                session.requests.underway.doing("restore", name) as far,
            ):
                await asyncio.to_thread(_unpack, store, manifest, directory, both(far, note))
            new = await self._saved.kernel(session, store, manifest)
            children = await self._saved.children(new, store, manifest)
            order = Revive(str(directory), new.id, beside=True)
            revived = await manager.order(order, Revived, REVIVE_SECONDS)
            new.kernel.take(revived.pid)
            await new.kernel.wait_joined(JOIN_SECONDS)
            await wake_children(revived.pid, children, manifest, JOIN_SECONDS)
            session.core.check_usable()
            await manager.order(CommitReplace(), Done, ORDER_SECONDS)
        except BaseException as error:
            self._replaced.discard(session.id)
            if revived is not None:
                with contextlib.suppress(ControlError):  # then it lets requests through by itself
                    await manager.order(LetThrough(), Done, ORDER_SECONDS)
            if new is not None:
                new.close("Its process could not be restored.")
            if directory is not None:
                await asyncio.to_thread(self._directories.remove, directory)
            if isinstance(error, OSError):
                raise ControlError(f"Its process cannot be restored: {error}", "unavailable") from (
                    error
                )
            raise
        task = asyncio.create_task(self._replace(session, new, manager, directory, name))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)
        return {
            "checkpoint": manifest.label.name,
            "variables": len(manifest.label.meta["saved"]),
            "files": 0,
            "aside": {},
            "problems": [],
        }

    async def _replace(
        self,
        session: Session,
        new: Session,
        manager: ProcessManagerConnection,
        directory: Path,
        name: str,
    ) -> None:
        """Give the new process the kernel's clients, as soon as their requests are answered."""
        session.managers.hand_over(manager, new.managers)
        session.kernel.end_is_wanted = True
        try:
            # The kernel reports the outcome to callers from outside; it executes no request then.
            await session.requests.settled("restore", name, CARRIED_SECONDS)
            await manager.order(Replace(), Done, REPLACE_SECONDS)
            log.info("Session %s has taken the place of %s", new.id, session.id)
            session.close(f"Session {new.id} has taken its place.")
        except ControlError as error:
            log.warning("Session %s cannot take the place of %s: %s", new.id, session.id, error)
            # The kernel knows that it is replaced, and executes nothing any more.
            new.close(f"It could not take the place of its kernel: {error}")
            session.close(f"Its place was to be taken by session {new.id}: {error}")
        finally:
            self._replaced.discard(session.id)
            await asyncio.to_thread(self._directories.remove, directory)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)


def _environments(manifest: Manifest) -> set[tuple[str, str]]:
    """Return interpreter and version of torch of each saved process that uses a device."""
    found = {(manifest.label.meta["process"]["python"], manifest.label.torch)}
    found |= {(each["request"]["python"], each["torch"]) for each in children_of(manifest)}
    return {(python, torch) for python, torch in found if torch}


def _unpack(store: ChunkStore, manifest: Manifest, directory: Path, note: Note) -> None:
    unpack(store, manifest, directory, note)
    try:
        images.check(directory)
    except ProcessError as error:
        raise ControlError(f"{str(error).rstrip('.')}.", "unavailable") from error
