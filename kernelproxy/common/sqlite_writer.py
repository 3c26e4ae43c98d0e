"""Asynchronous SQLite writer, so that callers do not wait for a disk.

One thread executes queued statements in batches, each in one transaction. If the process is killed,
the most recent statements may be lost; the file stays consistent.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

BUSY_SECONDS = 5.0
#: Maximum number of queued statements: further ones are dropped.
WAITING_MAX = 100_000
DAMAGED = ".damaged"

_Statement = tuple[str, tuple[Any, ...]]


class SqliteWriter:
    """Executes statements in a thread until `close`.

    Parameters
    ----------
    path : Path
        The file, which only its owner can access. A damaged file is renamed, and a new one is
        created.
    schema : str
        Statements that create missing tables.
    what : str
        Name of the data, for the log. A problem that continues is logged once.
    """

    def __init__(self, path: Path, schema: str, what: str) -> None:
        self._path, self._schema, self._what = path, schema, what
        self._waiting: queue.SimpleQueue[_Statement | None] = queue.SimpleQueue()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="sing-scribe", daemon=True)
        self._thread.start()

    def put(self, statement: str, *values: Any) -> None:
        """Queue a statement with its values; statements are executed in order."""
        if self._waiting.qsize() < WAITING_MAX:
            self._waiting.put((statement, values))

    def close(self) -> None:
        """Write the queued statements, and end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            batch, ending = self._next()
            try:
                self._write(batch)
                self._complained = False
            except (sqlite3.Error, OSError) as error:
                if not self._complained:
                    log.warning("%s cannot be written down: %s", self._what, error)
                self._complained = True

    def _next(self) -> tuple[list[_Statement], bool]:
        """Wait for statements; return all that are queued, and True if `close` was called."""
        batch: list[_Statement] = []
        found = self._waiting.get()
        while found is not None:
            batch.append(found)
            try:
                found = self._waiting.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _write(self, batch: list[_Statement]) -> None:
        try:
            self._execute(batch)
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # subclasses: in use, or full
                raise
            log.warning("%s is damaged, and put aside: %s", self._path, error)
            self._path.replace(self._path.with_name(self._path.name + DAMAGED))
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._execute(batch)

    def _execute(self, batch: list[_Statement]) -> None:
        with opened(self._path, self._schema) as database:
            for statement, values in batch:
                database.execute(statement, values)


@contextlib.contextmanager
def opened(path: Path, schema: str | None = None) -> Iterator[sqlite3.Connection]:
    """Open a file for one transaction.

    Parameters
    ----------
    path : Path
    schema : str, optional
        As in `SqliteWriter`; without it, the file is opened read-only.
    """
    write = schema is not None
    if write and not path.exists():
        path.touch(mode=0o600)
    mode = "rwc" if write else "ro"
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", BUSY_SECONDS, uri=True)
    try:
        if schema is not None:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(schema)
        with database:
            yield database
    finally:
        database.close()
