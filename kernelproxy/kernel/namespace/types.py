"""What a capture consists of, and what it asks of the device session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

#: Memory from this size on travels beside the stream, not in it.
BUFFER_BYTES = 64 << 10
#: Device storages below this size travel in the stream, and not by number.
INLINE_BYTES = 4 << 10


@dataclass(frozen=True)
class Item:
    """A variable that was saved.

    Parameters
    ----------
    name : str
        Its name, or an expression such as ``Out[3]``.
    kind : str
        Its type in a word.
    bytes : int
        What it added to the stream, the buffers and the device storages. What it shares with
        variables before it is counted there.
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
        The variable.
    why : str
        One line for people, such as ``model_server.sock: a socket``.
    partly : bool
        Whether the variable is there, without what the line says.
    """

    name: str
    why: str
    partly: bool = False


@dataclass
class Captured:
    """A namespace as bytes.

    Parameters
    ----------
    stream : bytes
        The pickles and their index.
    buffers : list of memoryview
        Memory that the stream refers to, in order. They are views of the notebook's own memory:
        write them out before its code goes on.
    storages : dict of int to int
        Device storages that the stream refers to, by the number that `DevicePart` gave them, and
        their bytes. Whoever keeps the stream keeps their content.
    saved, omitted : list
        What is in it, and what is not.
    """

    stream: bytes
    buffers: list[memoryview]
    storages: dict[int, int]
    saved: list[Item]
    omitted: list[Omission]


@dataclass
class Restored:
    """A namespace again.

    Parameters
    ----------
    namespace : dict of str to object
        The variables.
    extra : dict of str to object
        What `capture` was given beside them.
    problems : list of Omission
        Variables that are not there, or not whole, although they were saved.
    """

    namespace: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    problems: list[Omission] = field(default_factory=list)


class DevicePart(Protocol):
    """The device's side of a checkpoint; called on the main thread, between two cells."""

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is this device's, and not host memory."""

    def number(self, storage: torch.UntypedStorage) -> int:
        """Number under which the device's snapshot has a storage."""

    def read(self, storage: torch.UntypedStorage) -> bytes:
        """Content of a small storage."""

    def load(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """A storage of this device with the content that the snapshot has under a number.

        Called once for each number. May raise whatever says why it cannot.
        """

    def write(self, content: bytes) -> torch.UntypedStorage:
        """A new storage of this device with the given content."""

    def rng_states(self) -> Sequence[bytes]:
        """States of the default generators, one for each device."""

    def set_rng_states(self, states: Sequence[bytes]) -> None:
        """Put back what `rng_states` returned."""


class Refused(Exception):  # noqa: N818 (never leaves this package)
    """Raised while pickling by who knows that an object cannot be saved; says what it is."""


Reduced = tuple[Any, ...]
Extra = Mapping[str, object]
