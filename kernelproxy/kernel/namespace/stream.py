"""Layout of a stream: pickles that share a memo, and an index of them.

    preamble | one pickle for each variable | ... | index | length of the index | mark

The pickles were written by one pickler, one after the other, so that later ones refer to objects of
earlier ones. The index has the position of each pickle, and the numbers of buffers and memo entries
before it. With these, reading can continue after a pickle that cannot be read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from kernelproxy.common.errors import StoreError
from kernelproxy.common.untrusted import parse_json

MARK = b"SINGNS01"
#: Number of pickles before those of variables.
PREAMBLE = 4
_TAIL = struct.Struct("<Q8s")


@dataclass(frozen=True)
class Segment:
    """Pickle of one variable.

    Parameters
    ----------
    group : str
        ``variable`` or ``extra``.
    name : str
        Name of the variable.
    offset : int
        Position of its pickle.
    buffers, memo : int
        Numbers of buffers and memo entries before it.
    """

    group: str
    name: str
    offset: int
    buffers: int
    memo: int


def join(body: bytes, segments: Sequence[Segment], search: Sequence[str]) -> bytes:
    """Append an index to pickles; `search`: the search path for modules."""
    index = {"segments": [astuple(segment) for segment in segments], "search": list(search)}
    text = json.dumps(index).encode()
    return b"".join((body, text, _TAIL.pack(len(text), MARK)))


def split(stream: bytes) -> tuple[list[Segment], list[str]]:
    """Read the index: the segments, and the search path for modules.

    Raises
    ------
    StoreError
        If the stream is not valid.
    """
    try:
        length, mark = _TAIL.unpack(stream[-_TAIL.size :])
        if mark[:6] != MARK[:6]:
            raise ValueError("no mark")  # noqa: TRY301
        index = parse_json(stream[len(stream) - _TAIL.size - length : -_TAIL.size])
        segments = [Segment(*entry) for entry in index["segments"]]
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise StoreError("This is not a saved namespace.", "damaged") from error
    if mark != MARK:
        raise StoreError("The namespace was saved by another version.", "newer")
    return segments, index["search"]
