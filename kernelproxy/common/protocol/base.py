"""Messages that all parties use."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.common.errors import Reason

SMALL_BYTES_MAX = 64 << 10
LARGE_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Message:
    """Base of all messages.

    Parameters
    ----------
    kind : str
        Name of a subclass on the wire, independent of the class's name. It never changes.
    """

    # Not annotated, so not a field: maximum length of a frame of this kind. Longer frames are not
    # parsed.
    frame_bytes_max = SMALL_BYTES_MAX
    wire_kind = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        if any(each.wire_kind == kind for each in Message.__subclasses__() if each is not cls):
            raise TypeError(f"Two messages are called {kind!r} on the wire.")
        cls.wire_kind = kind


@dataclass(frozen=True)
class Done(Message, kind="Done"):
    """Reply: the request is done; `message` is a user-facing sentence or empty."""

    message: str = ""


@dataclass(frozen=True)
class Error(Message, kind="Error"):
    """Reply: the request was not done.

    Parameters
    ----------
    message : str
        One user-facing sentence.
    reason : Reason
        One word for programs.
    """

    message: str
    reason: Reason
    frame_bytes_max = 1 << 20


@dataclass(frozen=True)
class Progress(Message, kind="Progress"):
    """Bytes or notebooks done, and in total; may come any number of times before a reply."""

    done: int
    total: int
