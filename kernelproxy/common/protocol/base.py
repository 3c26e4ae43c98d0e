"""What all parties say to each other."""

from __future__ import annotations

from dataclasses import dataclass

SMALL_BYTES_MAX = 64 << 10
LARGE_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class Message:
    """Base of all messages.

    Parameters
    ----------
    kind : str
        Name of a subclass on the wire, whatever the class is called. It never changes.
    """

    # Not annotated, so no field: how long a frame of this kind may be. Nothing longer is parsed.
    frame_bytes_max = SMALL_BYTES_MAX
    wire_kind = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        if any(each.wire_kind == kind for each in Message.__subclasses__() if each is not cls):
            raise TypeError(f"Two messages are called {kind!r} on the wire.")
        cls.wire_kind = kind


@dataclass(frozen=True)
class Done(Message, kind="Done"):
    """It is done; `message` is a sentence for people or empty."""

    message: str = ""


@dataclass(frozen=True)
class Error(Message, kind="Error"):
    """It was not done.

    Parameters
    ----------
    message : str
        One sentence for people.
    reason : str
        One word: ``unknown-session``, ``ambiguous``, ``not-allowed``, ``no-room``,
        ``unknown-device``, ``unknown-checkpoint``, ``already-attached``, ``ended``,
        ``unavailable``, ``bad-request``, ``bad-policy``, ``stopping``, ``failed``, or that of a
        `StoreError`; of the attendant also ``unknown-kernel``, ``has-server``; made by `control`:
        ``no-daemon``, ``timeout``.
    """

    message: str
    reason: str
    frame_bytes_max = 1 << 20


@dataclass(frozen=True)
class Progress(Message, kind="Progress"):
    """Bytes, or notebooks, done and in total; any number of these may come before another reply."""

    done: int
    total: int
