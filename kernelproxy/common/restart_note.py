"""Note with the time of the next start of a daemon that died repeatedly.

The supervisor writes it next to the socket; clients that wait for a reply read it. Standard library
only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError

SUFFIX = ".restart"
REPORT_AFTER_SECONDS = 1.0
_BYTES_MAX = 64


@contextlib.contextmanager
def noted(socket: Path, deaths: int, seconds: float) -> Iterator[None]:
    """Keep the note on disk while the supervisor backs off; errors in writing it are ignored.

    Parameters
    ----------
    socket : Path
        The daemon's socket.
    deaths : int
        How often the daemon died, each time soon after its start.
    seconds : float
        Seconds until the next start.
    """
    note = socket.with_name(socket.name + SUFFIX)
    with contextlib.suppress(OSError):
        note.write_text(f"{deaths} {time.time() + seconds:.0f}", "ascii")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            note.unlink()


def sentence(socket: Path) -> str:
    """Return a sentence with the time of the next start; "" if no supervisor backs off."""
    try:
        with socket.with_name(socket.name + SUFFIX).open("rb") as file:
            deaths, when = map(int, file.read(_BYTES_MAX).split())
        at = time.strftime("%H:%M:%S", time.localtime(when))
    except (OSError, ValueError, OverflowError):
        return ""
    if when < time.time() - 1:  # its supervisor was killed
        return ""
    return (
        f"The jupyter_sing daemon died {deaths} times in a row; it starts again at {at}. Sessions "
        "are kept. Its agent.log may say why it died."
    )


@contextlib.contextmanager
def reporting(report: Callable[[str], object]) -> Iterator[None]:
    """Pass `sentence` to `report`, once, if the body of the context takes longer than a second."""

    def check() -> None:
        with contextlib.suppress(ControlError):
            if text := sentence(paths.socket_path()):
                report(text)

    timer = threading.Timer(REPORT_AFTER_SECONDS, check)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
