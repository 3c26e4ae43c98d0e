"""Frames between ranks: a header, the call that the bytes belong to, and the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from kernelproxy.kernel.collectives.transport.outbox import OutboxPlace

_HEADER = struct.Struct("<QQIBxHQQI")
HEADER_BYTES = _HEADER.size
_NOWHERE = OutboxPlace(0, 0)
#: Texts are one sentence; calls are less.
TEXT_BYTES_MAX = 2000


class FrameKind(IntEnum):
    """Kinds of frames."""

    hello = 0
    """First of a connection; its text is the token of the process that connects."""
    collective = 1
    message = 2
    """Of ``send``; its number is the tag."""
    failure = 3
    """A collective of this group has failed; the text says why."""


@dataclass(frozen=True)
class Header:
    """The header of a frame.

    Parameters
    ----------
    kind : FrameKind
        What it is.
    group : int
        Identity of the process group.
    number : int
        Which collective of the group; of a message, its tag.
    source : int
        Rank, in the group, of the sender.
    stage : int
        Which exchange of the collective.
    text : str
        The call, as errors show it. Ranks that make the same call have the same text.
    length : int
        Number of bytes of the content.
    place : OutboxPlace, optional
        Where it is in the sender's outbox; without it, it follows.
    """

    kind: FrameKind
    group: int = 0
    number: int = 0
    source: int = 0
    stage: int = 0
    text: str = ""
    length: int = 0
    place: OutboxPlace | None = None

    def encode(self) -> bytes:
        """Return the header's bytes, and those of the text after them."""
        text = self.text.encode()[:TEXT_BYTES_MAX]
        kind = self.kind | self.stage << 4
        place = self.place or _NOWHERE
        fixed = (self.group, self.number, self.source, kind, len(text), self.length)
        return _HEADER.pack(*fixed, place.offset, place.acknowledgement) + text

    @classmethod
    def decode(cls, fixed: bytes | bytearray, text: bytes | bytearray) -> Header:
        """Read what `encode` wrote.

        Raises
        ------
        ValueError
            It is none.
        """
        group, number, source, kind, _, length, *place = _HEADER.unpack(fixed)
        words, found = text.decode(errors="replace"), OutboxPlace(*place)
        return cls(
            FrameKind(kind & 15), group, number, source, kind >> 4, words, length,
            None if found == _NOWHERE else found,
        )  # fmt: skip


def text_bytes(fixed: bytes | bytearray) -> int:
    """Return the length of the text that follows a header.

    Raises
    ------
    ValueError
        It is longer than allowed.
    """
    length: int = _HEADER.unpack(fixed)[4]
    if length > TEXT_BYTES_MAX:
        raise ValueError("a frame's text is too long")
    return length
