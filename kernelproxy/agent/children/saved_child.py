"""The session of a process that a kernel has started, as a part of the kernel's checkpoint.

The checkpoint is one manifest, whose extents are those of the kernel's own session. Each extent of
a child is a blob, so that another manifest can name its chunks. The children are numbered, parents
before their own children.

| blob                | content                                                           |
|---------------------|-------------------------------------------------------------------|
| `child-N-pages`     | the client's, the worker's and the agent's page, when its log was |
|                     | empty                                                             |
| `child-N-tables`    | the tables of its snapshot; missing if it had not used the device |
| `child-N-extent-K`  | extent K of that snapshot                                         |
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from kernelproxy.agent.process.image_packing import Blobs
from kernelproxy.agent.spill.spill_store import TABLES
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import StoreError
from kernelproxy.common.protocol.snapshot_tables import read_tables
from kernelproxy.storage.manifest import Blob, Extent, Manifest
from kernelproxy.storage.writer import Kept, Part

#: Name of the blob with a session's pages, in the manifest from which it begins.
PAGES = "process-pages"


@dataclass(frozen=True)
class ChildSide:
    """A child's session at the moment of a checkpoint.

    Parameters
    ----------
    pages : bytes
        The client's, the worker's and the agent's page.
    snapshot : Snapshot or None
        None: it has not used the device.
    arena_fd : int
    stored : Manifest or None
        Manifest of its spilled state, if its arena is empty.
    about : dict
        JSON: `session`, `parent` (their ids), `pid` (in the sandbox), `wake_fd`, `request`,
        `torch`, `device`, `position`, `cells_before`, `job` (see `JobMembership.record`), and the
        lineage of its state.
    """

    pages: bytes
    snapshot: Snapshot | None
    arena_fd: int
    stored: Manifest | None
    about: dict[str, Any]

    def extents(self) -> list[Extent]:
        """Return the ranges of its arena that the snapshot names."""
        if self.snapshot is None:
            return []
        found = read_tables(self.snapshot.fd).extents
        return [Extent(each.offset, each.count, each.version) for each in found]

    def described(self) -> dict[str, Any]:
        """Return what is known of it, as JSON."""
        places = [[each.offset, each.count, each.version] for each in self.extents()]
        return {**self.about, "extents": places}

    def blobs(self, number: int) -> Blobs:
        """Return its blobs as the child of a number."""
        found: Blobs = {f"child-{number}-pages": self.pages}
        if self.snapshot is None:
            return found
        fd = self.snapshot.fd
        found[f"child-{number}-tables"] = os.pread(fd, os.fstat(fd).st_size, 0)
        spilled = _extents_as_blobs(self.stored) if self.stored is not None else None
        for at, extent in enumerate(self.extents()):
            known = f"{extent.offset} {extent.count} {extent.version}"
            if spilled is not None and known in spilled.blobs:
                content: Part | Kept = Kept(spilled, known)
            else:
                content = Part(self.arena_fd, extent.offset, extent.count)
            found[f"child-{number}-extent-{at}"] = content
        return found


def _extents_as_blobs(manifest: Manifest) -> Manifest:
    """Return a view of a manifest in which each extent is a blob."""
    pairs = zip(manifest.extents, manifest.extent_chunks, strict=True)
    return replace(
        manifest,
        blobs={
            f"{extent.offset} {extent.count} {extent.version}": Blob(extent.count, chunks)
            for extent, chunks in pairs
        },
    )


def children_of(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the descriptions of the children in a checkpoint; see `ChildSide.described`."""
    return list(manifest.label.meta.get("process", {}).get("children", ()))


def child_view(manifest: Manifest, number: int) -> Manifest:
    """Return a view of a checkpoint that contains only the session of one child.

    Raises
    ------
    StoreError
        ``damaged``, if the checkpoint lacks parts of it.
    """
    about = children_of(manifest)[number]
    extents = tuple(Extent(*each) for each in about["extents"])
    names = {PAGES: f"child-{number}-pages", TABLES: f"child-{number}-tables"}
    try:
        return replace(
            manifest,
            blobs={
                name: manifest.blobs[stored]
                for name, stored in names.items()
                if name != TABLES or stored in manifest.blobs
            },
            extents=extents,
            extent_chunks=tuple(
                manifest.blobs[f"child-{number}-extent-{at}"].chunks for at in range(len(extents))
            ),
        )
    except KeyError as error:
        name = manifest.label.name
        raise StoreError(f"Checkpoint {name} is damaged: it lacks {error}.", "damaged") from error
