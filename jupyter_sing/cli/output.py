"""Standard output whose reader may close it, as in ``jupyter sing why S | head``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from kernelproxy.common.readable import escaped


class SafeOutput(io.TextIOBase):
    """Stream that discards what is written after its reader has closed the pipe, without an error.

    Names in the text come from other users and may contain terminal control sequences: they are
    escaped.

    Parameters
    ----------
    stream : TextIO
        Underlying stream; the caller remains its owner.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See `TextIO`."""
        try:
            self._stream.write(escaped(text, but="\n\t"))
            return len(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        """See `TextIO`."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        """Discard the rest, including what is flushed when the interpreter ends."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def isatty(self) -> bool:
        """See `TextIO`."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """See `TextIO`."""
        return self._stream.fileno()


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Replace standard output by an `SafeOutput`, and flush it at the end."""
    before = sys.stdout
    output = SafeOutput(before)
    sys.stdout = output
    try:
        yield
    finally:
        output.flush()
        sys.stdout = before
