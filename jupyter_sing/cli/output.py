"""Standard output whose reader may leave, as in ``jupyter sing why S | head``."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from kernelproxy.common.readable import escaped


class Output(io.TextIOBase):
    """Writes as long as somebody reads; what comes after that goes nowhere, and is no error.

    Names are of others' making, and may hold what controls a terminal: that is escaped.

    Parameters
    ----------
    stream : TextIO
        Stays the caller's.
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
        """Send the rest nowhere, also what is still to be flushed when the interpreter ends."""
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
def until_nobody_reads() -> Iterator[None]:
    """Let standard output be such an `Output`, and flush it at the end."""
    before = sys.stdout
    output = Output(before)
    sys.stdout = output
    try:
        yield
    finally:
        output.flush()
        sys.stdout = before
