"""Parts of a checkpoint: the host state, and what the device and the process add to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelproxy.agent.children.saved_child import ChildSide
from kernelproxy.agent.workers.snapshot import Snapshot
from kernelproxy.common.errors import ControlError
from kernelproxy.storage.manifest import Manifest

#: Names of the blobs of a checkpoint; those of the parts of the host state and of the contents of
#: files continue with a number.
SMALL_STORAGES, HOST_PART, FILE_CONTENT = "device-small", "host", "file"
_PARTS_MAX = 1 << 20


@dataclass(frozen=True)
class HostState:
    """A kernel's description of the host state that it hands over.

    Parameters
    ----------
    position : int
        Position of the log when it was captured: the device storages are of that position.
    parts : list of int
        Lengths of the parts in its file, in sequence.
    storages : dict of int to int
        Bytes of each device storage to which it refers, by number.
    about : dict
        User-facing: ``saved``, ``omitted`` of the namespace, ``left_out`` of files.
    files : list of dict
        The notebook's files; the content of those of kind ``file`` is in the second file.
    """

    position: int
    parts: list[int]
    storages: dict[int, int]
    about: dict[str, Any]
    files: list[dict[str, Any]]

    @property
    def contents(self) -> list[int]:
        """Lengths of the contents of files, in sequence."""
        return contents_of(self.files)

    @classmethod
    def parse(cls, raw: dict[str, Any], host_bytes: int, content_bytes: int) -> HostState:
        """Check a description from a kernel against the sizes of its two files.

        Raises
        ------
        ControlError
            If it is invalid.
        """
        try:
            parts = [int(each) for each in raw["parts"]]
            storages = {int(number): int(count) for number, count in raw["storages"]}
            position = int(raw["position"])
            about = {key: list(raw["about"][key]) for key in ("saved", "omitted")}
            about["left_out"] = list(raw["about"].get("left_out", ()))
            files = [dict(each) for each in raw["files"]]
            contents = contents_of(files)
        except (KeyError, TypeError, ValueError) as error:
            raise ControlError(f"The host state is no host state: {error!r}.", "bad-request") from (
                error
            )
        sizes = [position, *parts, *storages, *storages.values(), *contents]
        fits = 0 < sum(parts) <= host_bytes and sum(contents) <= content_bytes
        if min(sizes) < 0 or len(parts) + len(files) > _PARTS_MAX or not fits:
            raise ControlError("The host state has impossible sizes.", "bad-request")
        return cls(position, parts, storages, about, files)


@dataclass(frozen=True)
class DeviceSide:
    """The device's part of a checkpoint.

    Parameters
    ----------
    snapshot : Snapshot or None
        At the position of the host state; None if the device was not used.
    arena_fd : int
    previous : Manifest or None
        Of the same session: its spilled state if its arena is empty, or a base for unchanged data.
    checkpoint : Manifest or None
        The newest checkpoint of the same session, a base for what is unchanged of its process.
    """

    snapshot: Snapshot | None
    arena_fd: int
    previous: Manifest | None
    checkpoint: Manifest | None


@dataclass(frozen=True)
class ProcessSide:
    """The process of a kernel, as part of a checkpoint.

    Parameters
    ----------
    directory : Path
        Directory of its images.
    pages : bytes
        The client's, the worker's and the agent's page at that moment.
    about : dict
        What a session that continues from there needs, see `kernel_replacement`.
    children : sequence of ChildSide
        The sessions of processes that it has started, parents before their own children.
    """

    directory: Path
    pages: bytes
    about: dict[str, Any]
    children: Sequence[ChildSide] = ()


def contents_of(files: Sequence[dict[str, Any]]) -> list[int]:
    """Return the lengths of the contents of a notebook's files, in sequence."""
    return [int(each["size"]) for each in files if each["kind"] == "file"]
