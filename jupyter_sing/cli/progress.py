"""Progress bar on one terminal line, which is overwritten at each update."""

from __future__ import annotations

import sys
import time

from kernelproxy.common.units import bytes_text

SHOWN_AFTER_SECONDS = 0.5
_CLEAR = "\r\x1b[K"
_WIDTH = 20


class Line:
    """Progress line on standard error, if that is a terminal, after half a second.

    Parameters
    ----------
    what : str
        Name of the operation.
    wanted : bool
        Whether it may be shown at all: not for programs.
    """

    def __init__(self, what: str, *, wanted: bool = True) -> None:
        self._what, self._began = what, time.monotonic()
        self._wanted, self._shown = wanted, False

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def show_bytes(self, done: int, total: int) -> None:
        """Show how many bytes are done."""
        if total:
            self._show(done, total, f"{bytes_text(done)} of {bytes_text(total)}")

    def show_notebooks(self, done: int, total: int) -> None:
        """Show how many notebooks are done."""
        if total:
            self._show(done, total, f"{done} of {total} notebook{'' if total == 1 else 's'}")

    def show_share(self, done: int, total: int) -> None:
        """Show how much is done."""
        if total:
            self._show(done, total, f"{100 * done // total} %")

    def _show(self, done: int, total: int, text: str) -> None:
        if not self._wanted or time.monotonic() - self._began < SHOWN_AFTER_SECONDS:
            return
        if sys.stderr.isatty():
            self._shown = True
            bar = ("#" * (_WIDTH * min(done, total) // total)).ljust(_WIDTH, ".")
            line = f"{_CLEAR}{self._what} [{bar}] {text}"
            print(line, end="", file=sys.stderr, flush=True)
