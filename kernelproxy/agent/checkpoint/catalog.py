"""Checkpoints of notebooks: the host state from a kernel and its device's snapshot, on disk.

A checkpoint is one manifest of the chunk store. Its extents are the device storages to which the
host state refers, its blobs the parts of the host state. Nothing of a checkpoint is executed or
unpickled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from kernelproxy.agent.checkpoint.checkpoint_reader import read_checkpoint
from kernelproxy.agent.checkpoint.checkpoint_writer import write_checkpoint
from kernelproxy.agent.checkpoint.open_checkpoints import OpenCheckpoints
from kernelproxy.agent.checkpoint.parts import DeviceSide, HostState, ProcessSide
from kernelproxy.agent.checkpoint.progress import Note
from kernelproxy.agent.checkpoint.retention import CheckpointOrigin
from kernelproxy.common.errors import ControlError, StoreError
from kernelproxy.common.protocol import CheckpointOpened
from kernelproxy.common.protocol.views import CheckpointView
from kernelproxy.common.readable import quoted
from kernelproxy.common.units import bytes_text
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label, Manifest
from kernelproxy.storage.threads import Cancel

KIND = "checkpoint"
#: Owner of checkpoints in the store, from the uid: sessions and checkpoints may share names.
_OWNER = "{}-checkpoints"


class CheckpointCatalog:
    """The checkpoints of all users of this daemon.

    Parameters
    ----------
    store : callable
        The chunk store; raises StoreError if it cannot be used.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._known: dict[int, dict[str, CheckpointOrigin]] = {}
        #: Held while origins are read, and while what was made or deleted meanwhile is noted.
        self._reading = asyncio.Lock()
        self._readers: Counter[tuple[int, str]] = Counter()
        self._openings = OpenCheckpoints()

    def name(self, wanted: str, session: str, how: str = "") -> str:
        """Return the name of a new checkpoint: the wanted one, or one made of session and time."""
        if wanted:
            return wanted
        stem = re.sub(r"[^A-Za-z0-9]+", "-", session.removesuffix(".ipynb")).strip("-")[:60]
        return f"{stem or 'notebook'}-{how}{time.strftime('%Y%m%d-%H%M%S')}"

    async def automatic_name(self, owner: int, session: str) -> str:
        """Return an unused name for an automatic checkpoint.

        Raises
        ------
        StoreError
            If the store cannot be read.
        """
        taken = await asyncio.to_thread(lambda: self._opened().names())
        names = {name for user, name in taken if user == _OWNER.format(owner)}
        while (name := f"{self.name('', session, 'auto-')}-{secrets.token_hex(2)}") in names:
            pass
        return name

    def check_size(self, host: HostState) -> None:
        """Refuse a host state whose declared size exceeds the limit of the store.

        Raises
        ------
        ControlError
            ``quota``.
        """
        limit = self._opened().limits.store
        if limit is not None and sum(host.parts) + sum(host.contents) > limit:
            raise ControlError(
                f"The notebook has more than {bytes_text(limit)}, the most a checkpoint may have.",
                "quota",
            )

    # ---------------------------------------------------------------- their origins

    async def records(self, owner: int) -> list[CheckpointOrigin]:
        """Return the origins of a user's readable checkpoints; raises StoreError."""

        def work() -> list[CheckpointOrigin]:
            store, found = self._opened(), []
            for user, name in store.names():
                if user == _OWNER.format(owner):
                    with contextlib.suppress(StoreError):  # `all` reports what is wrong with it
                        found.append(_record(store.load(user, name)))
            return found

        async with self._reading:
            found = await asyncio.to_thread(work)
            self._known[owner] = {each.name: each for each in found}
        return found

    async def learn(self, owner: int) -> None:
        """Read a user's origins for `known`, if that was not done yet."""
        if owner not in self._known:
            with contextlib.suppress(StoreError, OSError):  # a caller that needs it gets the error
                await self.records(owner)

    def known(self, owner: int) -> list[CheckpointOrigin]:
        """Return the origins as last read, updated by what was made and deleted here since."""
        return list(self._known.get(owner, {}).values())

    async def one(self, owner: int, name: str) -> CheckpointView:
        """Return one entry of what `all` lists; raises as `open`."""
        return await asyncio.to_thread(lambda: self._describe(self._load(owner, name)))

    # ---------------------------------------------------------------- making and reading

    async def put(
        self,
        owner: int,
        label: Label,
        host: HostState,
        fds: Sequence[int],
        device: DeviceSide,
        process: ProcessSide | None,
        cancel: Cancel,
        progress: Callable[[int, int], object],
    ) -> tuple[CheckpointView, Manifest]:
        """Store a checkpoint; return its entry as in `all`, and its manifest.

        Raises
        ------
        StoreError
            See `ChunkStore.put`; ``damaged`` if the snapshot lacks storages of the host state.
        OSError
            If the images of a process cannot be read.
        """

        def work() -> tuple[CheckpointView, Manifest]:
            manifest = write_checkpoint(
                self._opened, label, host, fds, device, process, cancel, progress
            )
            return self._describe(manifest), manifest

        made, manifest = await asyncio.to_thread(work)
        if owner in self._known:
            record = _record(manifest)
            async with self._reading:
                self._known[owner][record.name] = record
        else:
            await self.learn(owner)
        return made, manifest

    async def all(self, owner: int) -> list[CheckpointView]:
        """List a user's checkpoints, the newest first; unreadable ones with name and error."""

        def work() -> list[CheckpointView]:
            store, found = self._opened(), []
            for user, name in store.names():
                if user != _OWNER.format(owner):
                    continue
                try:
                    found.append(self._describe(store.load(user, name)))
                except StoreError as error:
                    found.append({"name": name, "created": "", "problem": str(error)})
            return sorted(found, key=lambda each: (each["created"], each["name"]), reverse=True)

        return await asyncio.to_thread(work)

    async def check(self, owner: int, name: str) -> None:
        """Raise as `open` unless there is such a checkpoint."""
        await asyncio.to_thread(self._load, owner, name)

    async def load(self, owner: int, name: str) -> tuple[ChunkStore, Manifest]:
        """Load the manifest of a checkpoint, to read more of it than `open`; raises as `open`."""
        return await asyncio.to_thread(lambda: (self._opened(), self._load(owner, name)))

    async def open(
        self,
        owner: int,
        name: str,
        progress: Callable[[int, int], object],
        *,
        process: bool = False,
        sessions: int = 0,
    ) -> tuple[CheckpointOpened, list[int]]:
        """Read and verify a checkpoint, or share what was read of it and is still in use.

        Parameters
        ----------
        owner : int
        name : str
        progress : callable
            Called with the bytes read and in total, in any thread.
        process : bool
            True if its process will be restored: then only its files are read.
        sessions : int
            Number of sessions of its owner; see `OpenCheckpoints` for what that bounds.

        Returns
        -------
        tuple
            The reply to the caller, and descriptors of which it takes ownership.

        Raises
        ------
        ControlError
            ``unknown-checkpoint``; ``too-many``, if its owner has too many others open.
        StoreError
            See `ChunkStore.get`.
        """

        def read_all(progress: Note) -> tuple[CheckpointOpened, list[int]]:
            # Described first: that may fail, and then no descriptors are open yet.
            found, form = self._describe(manifest), "process" if process else "namespace"
            parts, storages, fds = read_checkpoint(store, manifest, progress, process=process)
            return CheckpointOpened(found, parts, storages, manifest.label.meta["files"], form), fds

        with self.reading(owner, name):
            store, manifest = await self.load(owner, name)
            return await self._openings.open(
                owner, manifest, read_all, progress, process=process, sessions=sessions
            )

    @contextlib.contextmanager
    def reading(self, owner: int, name: str) -> Iterator[None]:
        """Prevent the automatic deletion of a checkpoint while it is read."""
        self._readers[owner, name] += 1
        try:
            yield
        finally:
            self._readers[owner, name] -= 1
            self._readers += Counter()  # drops counts of 0

    async def delete(self, owner: int, name: str) -> None:
        """Delete a checkpoint; raises as `open`."""

        def work() -> None:
            store = self._opened()
            try:
                store.delete(_OWNER.format(owner), name)
            except StoreError as error:
                raise _unknown(error, name) from error
            with contextlib.suppress(StoreError):  # others store or read: collect next time
                store.collect()

        await asyncio.to_thread(work)
        async with self._reading:
            self._known.get(owner, {}).pop(name, None)

    async def delete_unread(self, owner: int, name: str) -> None:
        """Delete a checkpoint, if it exists and is not being read; raises StoreError."""
        if not self._readers[owner, name]:
            with contextlib.suppress(ControlError):  # it was deleted meanwhile
                await self.delete(owner, name)

    def label(
        self, owner: int, name: str, torch: str, device_kind: str, position: int, meta: Any
    ) -> Label:
        """Return the label of a checkpoint that is to be stored."""
        user = _OWNER.format(owner)
        return Label(user, name, KIND, torch, device_kind, position, meta)

    def _opened(self) -> ChunkStore:
        store: ChunkStore = self._store()
        return store

    def _load(self, owner: int, name: str) -> Manifest:
        try:
            return self._opened().load(_OWNER.format(owner), name)
        except StoreError as error:
            raise _unknown(error, name) from error

    def _describe(self, manifest: Manifest) -> CheckpointView:
        label = manifest.label
        sizes = self._opened().sizes(label.owner, label.name)
        about = label.meta  # trusted: only this daemon writes manifests of this owner
        return {
            "name": label.name,
            "created": created_text(manifest.created),
            "session": about["session"],
            "notebook": about.get("notebook", ""),
            "kernel_id": about["kernel_id"],
            "automatic": about["automatic"],
            "forms": about["forms"],
            "torch": label.torch,
            "device": about["device"],
            "bytes": sizes.logical,
            "stored": sizes.stored,
            "exclusive": sizes.exclusive,
            "saved": about["saved"],
            "omitted": about["omitted"],
            "only_process": about.get("only_process", []),
            "files": len(about["files"]),
        }


def created_text(seconds: float) -> str:
    """Return a time, in seconds since 1970, in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _record(manifest: Manifest) -> CheckpointOrigin:
    about = manifest.label.meta
    return CheckpointOrigin(
        manifest.label.name,
        manifest.created,
        about["automatic"],
        about.get("run", ""),
        about["kernel_id"],
        about.get("notebook", ""),
    )


def _unknown(error: StoreError, name: str) -> Exception:
    if error.reason in ("unknown", "name"):
        return ControlError(f"There is no checkpoint {quoted(name)}.", "unknown-checkpoint")
    return error
