"""Types of a capture, and its interface to the device session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

#: Memory from this size on is stored beside the stream, not in it.
BUFFER_BYTES = 64 << 10
#: Device storages below this size are stored in the stream, not by number.
INLINE_BYTES = 4 << 10


@dataclass(frozen=True)
class Item:
    """Variable that was saved.

    Parameters
    ----------
    name : str
        Name, or an expression such as ``Out[3]``.
    kind : str
        Name of its type.
    bytes : int
        Bytes added to the stream, the buffers and the device storages. Memory shared with an
        earlier variable is counted there.
    """

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Omission:
    """Something that was not saved, or that could not be restored.

    Parameters
    ----------
    name : str
        Name of the variable.
    why : str
        One user-facing line, such as ``model_server.sock: a socket``.
    partly : bool
        True if the variable is there, except for what the line says.
    """

    name: str
    why: str
    partly: bool = False


@dataclass
class Captured:
    """Namespace as bytes.

    Parameters
    ----------
    stream : bytes
        Pickles and their index.
    buffers : list of memoryview
        Memory that the stream refers to, in order. They are views of the notebook's own memory:
        write them to disk before its code continues.
    storages : dict of int to int
        Device storages that the stream refers to, by the number from `DevicePart`, and their
        bytes. The owner of the stream must keep their content.
    saved, omitted : list
        What is in the stream, and what is not.
    """

    stream: bytes
    buffers: list[memoryview]
    storages: dict[int, int]
    saved: list[Item]
    omitted: list[Omission]


@dataclass
class RestoredNamespace:
    """Restored namespace.

    Parameters
    ----------
    namespace : dict of str to object
        Variables.
    extra : dict of str to object
        The `extra` objects of `capture`.
    problems : list of Omission
        Variables that were saved, but are missing or incomplete.
    """

    namespace: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Omission] = field(default_factory=list)


class DevicePart(Protocol):
    """Device's side of a checkpoint; called on the main thread, between two cells."""

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is this device's, not host memory."""

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's number in the device's snapshot."""

    def read(self, storage: torch.UntypedStorage) -> bytes:
        """Return the content of a small storage."""

    def load(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of this device with the snapshot's content for a number.

        Called once for each number. May raise any exception that explains why it fails.
        """

    def write(self, content: bytes) -> torch.UntypedStorage:
        """Return a new storage of this device with the given content."""

    def rng_states(self) -> Sequence[bytes]:
        """Return the states of the default generators, one for each device."""

    def set_rng_states(self, states: Sequence[bytes]) -> None:
        """Restore the result of `rng_states`."""


class Unsaveable(Exception):  # noqa: N818 (never leaves this package)
    """Raised while pickling by a reducer whose object cannot be saved; describes the object."""


Reduced = tuple[Any, ...]
Extra = Mapping[str, object]
