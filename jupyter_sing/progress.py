"""How far something is, as a line of a terminal that replaces itself."""

from __future__ import annotations

import sys
import time

from jupyter_sing.table import bytes_text

SHOWN_AFTER_SECONDS = 0.5
_CLEAR = "\r\x1b[K"


class Line:
    """Shown on standard error, if that is a terminal, once it has taken half a second.

    Parameters
    ----------
    what : str
        What is being done.
    """

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        self._shown = False

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def show_bytes(self, done: int, total: int) -> None:
        """Show how many bytes are done."""
        if total:
            self._show(f"{bytes_text(done)} of {bytes_text(total)}")

    def show_notebooks(self, done: int, total: int) -> None:
        """Show how many notebooks are done."""
        if total:
            self._show(f"{done} of {total} notebook{'' if total == 1 else 's'}")

    def _show(self, text: str) -> None:
        if time.monotonic() - self._began >= SHOWN_AFTER_SECONDS and sys.stderr.isatty():
            self._shown = True
            print(f"{_CLEAR}{self._what}: {text}", end="", file=sys.stderr, flush=True)
