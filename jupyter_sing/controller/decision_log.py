"""Decisions with their reasons, and accounts, in a file.

`jupyter sing why` reads the decisions, and the next controller the accounts.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from kernelproxy.common.errors import ControlError
from kernelproxy.common.readable import quoted
from kernelproxy.common.sqlite_writer import SqliteWriter, opened

log = logging.getLogger(__name__)

NAME = "decisions.sqlite3"
#: Number of decisions that are kept, and of new ones after which older ones are removed.
KEPT, TIDY_EVERY = 100_000, 1000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    session TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_session ON decisions (session, number);
CREATE TABLE IF NOT EXISTS accounts (
    only INTEGER PRIMARY KEY CHECK (only = 0),
    at REAL NOT NULL,
    sessions TEXT NOT NULL,
    accounts TEXT NOT NULL
);
"""


@dataclass(frozen=True)
class DecisionEntry:
    """One decision.

    Parameters
    ----------
    at : float
        Seconds of the epoch.
    session, name : str
        Id and name of the session.
    kind : str
        ``grant``, ``preempt``, ``evict``, ``migrate``, ``pack``, ``unpack``, ``queued``;
        ``shrink`` and ``grow`` if its job gets fewer or more devices; ``terms`` if other terms
        apply to it from then on; ``lost`` if its worker was ended; ``restart`` if the controller
        was restarted.
    reason : str
        A sentence.
    """

    at: float
    session: str
    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class SavedAccounts:
    """State that a controller leaves to the next one.

    Parameters
    ----------
    at : float
        Seconds of the epoch.
    sessions : list of str
        Ids of the sessions that were open.
    accounts : dict
        See `Engine.accounts`.
    """

    at: float
    sessions: list[str]
    accounts: dict[str, Any]


class DecisionLog:
    """Writes decisions and accounts until `close`.

    Parameters
    ----------
    directory : Path
        Only the owner can read the file. Entries that cannot be written are lost, which is logged
        once.
    """

    def __init__(self, directory: Path) -> None:
        self._writer = SqliteWriter(directory / NAME, _SCHEMA, "Decisions")
        self._noted = 0

    def note(self, entry: DecisionEntry) -> None:
        """Write a decision asynchronously."""
        self._writer.put(
            "INSERT INTO decisions (at, session, name, kind, reason) VALUES (?, ?, ?, ?, ?)",
            *astuple(entry),
        )
        self._noted += 1
        if self._noted >= TIDY_EVERY:
            self._tidy()

    def _tidy(self) -> None:
        self._noted = 0
        oldest = "(SELECT max(number) FROM decisions) - ?"
        self._writer.put(f"DELETE FROM decisions WHERE number <= {oldest}", KEPT)

    def keep(self, accounts: SavedAccounts) -> None:
        """Write accounts asynchronously, replacing the previous ones."""
        self._writer.put(
            "REPLACE INTO accounts (only, at, sessions, accounts) VALUES (0, ?, ?, ?)",
            accounts.at,
            json.dumps(accounts.sessions),
            json.dumps(accounts.accounts),
        )

    def close(self) -> None:
        """Write what is left, and end."""
        self._tidy()
        self._writer.close()


def read_accounts(directory: Path) -> SavedAccounts | None:
    """Return the accounts of the previous controller; None if missing or damaged (logged)."""
    path = directory / NAME
    if not path.exists():
        return None
    try:
        with opened(path) as database:
            tables = "SELECT name FROM sqlite_master WHERE name = 'accounts'"
            if database.execute(tables).fetchone() is None:
                return None  # written by a version without accounts
            row = database.execute("SELECT at, sessions, accounts FROM accounts").fetchone()
        if row is None:
            return None
        return SavedAccounts(float(row[0]), list(json.loads(row[1])), dict(json.loads(row[2])))
    except (sqlite3.Error, ValueError, TypeError) as error:
        log.warning("What everybody has had is forgotten: %s cannot be read: %s", path, error)
        return None


def read(directory: Path, session: str, count: int) -> list[DecisionEntry]:
    """Return the last decisions about a session, the oldest of them first.

    Parameters
    ----------
    directory : Path
    session : str
        An id, a unique prefix of one, or a name (then the newest session of that name).
    count : int
        Maximum number of decisions.

    Raises
    ------
    ControlError
        If there are none, or if the prefix matches several ids.
    """
    path = directory / NAME
    nothing = ControlError(f"No decision about {quoted(session)} is recorded.", "unknown-session")
    if not path.exists() or not session:
        raise nothing
    try:
        with opened(path) as database:
            ids = database.execute(
                "SELECT DISTINCT session FROM decisions WHERE substr(session, 1, ?) = ? LIMIT 3",
                (len(session), session),
            ).fetchall()
            if len(ids) > 1 and (session,) not in ids:
                raise ControlError(f"Several sessions match {quoted(session)}.", "ambiguous")
            if not ids:
                ids = database.execute(
                    "SELECT session FROM decisions WHERE name = ? ORDER BY number DESC LIMIT 1",
                    (session,),
                ).fetchall()
            if not ids:
                raise nothing
            found = session if (session,) in ids else ids[0][0]
            rows = database.execute(
                "SELECT at, session, name, kind, reason FROM decisions WHERE session = ?"
                " ORDER BY number DESC LIMIT ?",
                (found, count),
            ).fetchall()
    except sqlite3.Error as error:
        raise ControlError(f"The decisions in {path} cannot be read: {error}", "failed") from error
    return [DecisionEntry(*row) for row in reversed(rows)]
