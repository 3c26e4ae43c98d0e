"""What activation has come to in this process, and who is told of cells, wishes and restores.

Needs the standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kernelproxy.common.errors import InternalError
from kernelproxy.common.untrusted import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelproxy.common.protocol import Wish
    from kernelproxy.kernel.activation.native_client import NativeClient


@dataclass(frozen=True)
class Woken:
    """What the line says that ends an absence.

    Parameters
    ----------
    restored : bool
        Whether this is another process than the one that left.
    session : str
        Which it joins.
    connection_file : str
        Of the kernel in whose place it is; "": that of the one that left.
    ports : dict of int to int
        Other numbers of ports at which it listens, by those of the one that left.
    environment : dict of str to str
        Variables that have other values for the kernel in whose place it is.
    """

    restored: bool
    session: str
    connection_file: str = ""
    ports: dict[int, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> Woken | None:
        """Read a line; None if it is none of these."""
        try:
            found = parse_json(line)
            return cls(
                bool(found["restored"]),
                str(found["session"]),
                str(found.get("connection_file", "")),
                {int(old): int(new) for old, new in found.get("ports", {}).items()},
                {str(name): str(text) for name, text in found.get("environment", {}).items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class Line(Protocol):
    """A connection to the daemon that stays; as `agent_connection.Link`."""

    def tell_cells(self, ended: int) -> None:
        """Tell how many cells have ended."""

    def tell_asked(self) -> None:
        """Tell that another cell was asked for while one runs."""

    def end(self) -> None:
        """Close it."""


@dataclass
class Activation:
    """What activation came to in this process.

    Parameters
    ----------
    session : str
        Id of the session, "" if there is none.
    reason : str
        Why torch runs on CPU only, "" if it does not (or was not imported yet).
    client : NativeClient or None
        The native client, once torch was imported and joined the session.
    cells : int
        Cells that run now.
    cells_ended : int
        Cells that have ended before there was a client.
    listening : Line or None
        What hears the daemon in a notebook, until torch is imported.
    link : Line or None
        The client's connection.
    """

    session: str = ""
    reason: str = ""
    client: NativeClient | None = None
    cells: int = 0
    cells_ended: int = 0
    listening: Line | None = None
    link: Line | None = None


_lock = threading.Lock()
_current = Activation()
#: Carries out the daemon's wishes, in a notebook; called in a thread of ours.
on_wish: Callable[[Wish], object] | None = None
#: Told, before the session is joined again, that this process was made of images.
on_restored: Callable[[Woken], object] | None = None


def current() -> Activation:
    """Return what activation came to in this process."""
    return _current


def explain(reason: str) -> None:
    """Say, in one plain line, why torch has no device here."""
    _current.reason = reason
    print(f"jupyter_sing: CPU only: {reason}.", file=sys.stderr)


def cell(change: int) -> None:
    """Count a cell that begins (1) or ends (-1), whether or not torch was imported yet."""
    with _lock:
        _current.cells += change
        if _current.client is not None:
            _current.client.cell(change)
        elif change < 0:
            _current.cells_ended += 1
            if _current.listening is not None:
                _current.listening.tell_cells(_current.cells_ended)


def cell_asked() -> None:
    """Another cell was asked for: in the middle of one, say so. Never waits; in any thread."""
    link = _current.link
    if _current.cells and link is not None:
        link.tell_asked()


def joined(client: NativeClient) -> None:
    """Called by the hook when the session was joined, perhaps in the middle of a cell."""
    with _lock:
        _current.client = client
        for _ in range(_current.cells):
            client.cell(1)
        listening, _current.listening = _current.listening, None
    if listening is not None:
        listening.end()


def listens(line: Line) -> None:
    """Note the connection of a notebook in which torch is not imported yet."""
    with _lock:
        _current.listening = line


def restored(woken: Woken) -> None:
    """Called by the link: this process was made of the images of another one.

    Raises
    ------
    InternalError
        If it cannot be another one.
    """
    _current.session = os.environ["SING_SESSION"] = woken.session
    if on_restored is not None:
        try:
            on_restored(woken)
        except Exception as error:
            raise InternalError(
                f"A restored kernel cannot take its place: {type(error).__name__}: {error}."
            ) from error
