"""Writes what happens into a file, so that nobody who notes something waits for a disk.

One thread executes statements of SQLite in transactions of what has come meanwhile. What was noted
in the last moments before the process is killed may be lacking; what is there is whole.
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
#: Statements that wait for a disk, at most: others are lost.
WAITING_MAX = 100_000
DAMAGED = ".damaged"

_Statement = tuple[str, tuple[Any, ...]]


class Scribe:
    """Executes statements until `close`.

    Parameters
    ----------
    path : Path
        Of the file, which is for its owner alone. One that is damaged is put aside, and a new one
        is begun.
    schema : str
        Statements that make its tables where they are missing.
    what : str
        What is written down, for the log, which says once what is wrong.
    """

    def __init__(self, path: Path, schema: str, what: str) -> None:
        self._path, self._schema, self._what = path, schema, what
        self._waiting: queue.SimpleQueue[_Statement | None] = queue.SimpleQueue()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="sing-scribe", daemon=True)
        self._thread.start()

    def put(self, statement: str, *values: Any) -> None:
        """Execute a statement with such values, soon, after those that were put before."""
        if self._waiting.qsize() < WAITING_MAX:
            self._waiting.put((statement, values))

    def close(self) -> None:
        """Write what is left, and end."""
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
        """Wait for something to write; return all there is, and whether that is the end."""
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
            if type(error) is not sqlite3.DatabaseError:  # others say that it is in use, or full
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
        As of `Scribe`; without one it is only read.
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
