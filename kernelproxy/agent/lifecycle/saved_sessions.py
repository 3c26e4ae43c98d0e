"""Sessions that continue where those of a checkpoint were saved: the kernel's, and its children's.

Nothing of a device state is copied: a session gets a manifest of its own, which names chunks that
exist already, and its state is loaded as it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelproxy.agent.children.saved_child import PAGES, child_view, children_of
from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lifecycle.family import Families
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.job import JobRank
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.spill.spill_store import TABLES, SpillStore
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import OpenSession
from kernelproxy.common.protocol.snapshot_tables import read_tables
from kernelproxy.common.shared_memory import PAGE_BYTES, SessionMemory
from kernelproxy.criu.process_tree import numbers, tree
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label, Manifest

RESTORED = "Restored from a checkpoint. Resumes when you run a cell."
CHILD_RESTORED = "Restored from a checkpoint. Resumes when its process continues."

Add = Callable[[str, OpenSession, int, DeviceAllocator, DeviceState], Session]
Place = Callable[[str, DeviceAllocator], DeviceAllocator]


class SavedSessions:
    """Makes sessions in the states that checkpoints have of them.

    Parameters
    ----------
    cold : SpillStore
    settings : AgentSettings
    add : callable
        Makes a session: its id, request, owner, allocator and state.
    place : callable
        Returns the device for a child, from the id of the one that it was on, and the kernel's.
    """

    def __init__(self, cold: SpillStore, settings: AgentSettings, add: Add, place: Place) -> None:
        self._cold, self._settings, self._add, self._place = cold, settings, add, place

    async def kernel(self, replaced: Session, store: ChunkStore, manifest: Manifest) -> Session:
        """Make the session to which the restored process of a kernel attaches.

        Parameters
        ----------
        replaced : Session
            Of the kernel whose place it takes.
        store : ChunkStore
        manifest : Manifest
            The checkpoint.

        Raises
        ------
        ControlError, StoreError, OSError
            If that is not possible.
        """
        label, core = manifest.label, replaced.core
        about = label.meta["process"]
        request = replace(core.request, python=about["python"], key=secrets.token_hex(8))
        new = await self._begin(
            store, manifest, {
                **about, "torch": label.torch, "position": label.position,
                "session": label.meta["run"],
            },
            request, core.owner, core.allocator,
        )  # fmt: skip
        new.maker.continue_from(manifest)
        new.automatic.continue_from(replaced.automatic)
        new.preferences.continue_from(replaced.preferences)
        new.history.fresh = False
        new.begin_suspended(RESTORED)
        return new

    async def children(
        self, kernel: Session, store: ChunkStore, manifest: Manifest
    ) -> list[Session]:
        """Make the sessions of the processes that a kernel had started; raises as `kernel`.

        If this fails, those that were made end with the kernel's.
        """
        label, found = manifest.label, list[Session]()
        by_id = {label.meta["run"]: kernel}
        for number, about in enumerate(children_of(manifest)):
            parent = by_id[about["parent"]]
            request = self._request(about, parent, label.meta["session"], kernel.core.name)
            kernels = kernel.core.allocator
            was_beside = about["device"] == label.meta["device"]
            allocator = kernels if was_beside else self._place(about["device"], kernels)
            view = child_view(manifest, number)
            new = await self._begin(store, view, about, request, kernel.core.owner, allocator)
            new.preferences.inherit(parent.preferences)
            if about["job"] is not None:
                new.membership.join(_another(JobRank(**about["job"]), kernel.id))
            new.begin_suspended(CHILD_RESTORED)
            by_id[about["session"]] = new
            found.append(new)
        return found

    @staticmethod
    def _request(about: Mapping[str, Any], parent: Session, was: str, now: str) -> OpenSession:
        request = OpenSession(**about["request"])
        name = now + request.name.removeprefix(was) if request.name.startswith(was) else ""
        request = replace(request, name=name or request.name, device=None, key=secrets.token_hex(8))
        return Families.inherited(request, parent, named=True)

    async def _begin(
        self,
        store: ChunkStore,
        saved: Manifest,
        about: Mapping[str, Any],
        request: OpenSession,
        owner: int,
        allocator: DeviceAllocator,
    ) -> Session:
        """Make a session from a manifest with its pages, its tables and its extents."""
        name = secrets.token_hex(6)
        memory = SessionMemory(int(about["log_bytes"]))
        state = DeviceState(name, allocator.device, self._settings, memory)
        try:
            label = self._cold.label(
                name, request.name, owner, request.user, about["torch"],
                saved.label.device_kind, int(about["position"]),
            )  # fmt: skip
            copied = await asyncio.to_thread(_copy, store, saved, label)
            state.begin_cold(*copied, int(about["epoch"]))
        except BaseException:
            await state.close()
            raise
        new = self._add(name, request, owner, allocator, state)
        new.kernel.awaits_another = True
        new.kernel.continues = (*about.get("continues", ()), about["session"])
        new.kernel.cells_before = int(about["cells_before"])
        new.kernel.torch_version = about["torch"] or None
        return new


def _another(job: JobRank, run: str) -> JobRank:
    """Return a rank's place in a copy of its job: the original may continue beside it."""
    return replace(job, id=f"{job.id.partition('@')[0]}@{run}")


async def wake_children(
    kernel_pid: int, children: Sequence[Session], manifest: Manifest, seconds: float
) -> None:
    """Make the restored processes of sessions attach to them.

    Parameters
    ----------
    kernel_pid : int
        The restored process that had started them.
    children : sequence of Session
        As `SavedSessions.children` has returned them.
    manifest : Manifest
        The checkpoint.
    seconds : float
        Time limit.

    Raises
    ------
    ControlError
        If one of them does not attach.
    """
    pids = {}
    for pid in tree(kernel_pid):
        with contextlib.suppress(OSError):  # it has ended
            pids[numbers(pid)[-1]] = pid
    for session, about in zip(children, children_of(manifest), strict=True):
        if about["pid"] not in pids:
            raise ControlError(f"{session.core.name}: its process is not there.", "unavailable")
        session.kernel.wake_restored(pids[about["pid"]], int(about["wake_fd"]))
    await asyncio.gather(*(each.kernel.wait_joined(seconds) for each in children))


def _copy(
    store: ChunkStore, manifest: Manifest, label: Label
) -> tuple[list[bytes], Snapshot | None, Manifest | None]:
    """Return what a session begins with: pages, snapshot, and a manifest of its own.

    Only that manifest is new: it names chunks that exist already.
    """
    raw = store.blob(manifest, PAGES)
    pages = [raw[at : at + PAGE_BYTES] for at in range(0, 3 * PAGE_BYTES, PAGE_BYTES)]
    if TABLES not in manifest.blobs:
        return pages, None, None
    fd = os.memfd_create("sing-snapshot", os.MFD_CLOEXEC)
    try:
        store.write_blobs(manifest, [TABLES], fd)
        tables = read_tables(fd)
        nothing = os.memfd_create("sing-nothing", os.MFD_CLOEXEC)
        try:
            stored = store.put(
                label,
                nothing,
                tables.extents,
                blobs={TABLES: os.pread(fd, os.fstat(fd).st_size, 0)},
                previous=manifest,
            )
        finally:
            os.close(nothing)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return pages, Snapshot(fd, tables.position, tables.state_bytes), stored
