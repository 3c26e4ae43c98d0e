"""The activity record of the last day in its file: use of devices by sessions, and events.

| table      | a row is                                                                            |
|------------|-------------------------------------------------------------------------------------|
| `devices`  | a device, as it was when the last daemon began                                      |
| `sessions` | the owner of a session, and its name                                                |
| `changes`  | a time from which on a session is in a state: `timeline.Change`; the last one of    |
|            | each session is valid until now, however old it is                                  |
| `memory`   | a time from which on so many bytes of a device are in use                           |
| `events`   | an event of a session, as a sentence                                                |
| `executed` | a time until which a session has executed for so many seconds more                  |
| `alive`    | the last time at which a daemon is known to have been alive                         |

Note [Dead daemons]: a killed daemon has recorded no end of anything. The next daemon ends all that
was under way, at the last time at which its predecessor is known to have been alive; that is right
now if the supervisor has started it. Which sessions could be recovered is known soon after; the
others are lost.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kernelproxy.agent.status.timeline import Change, Span, Timeline, coarser, cut, merged
from kernelproxy.common.protocol.views import ActivityView, DeviceActivityView, EventView
from kernelproxy.common.sqlite_writer import SqliteWriter, opened

log = logging.getLogger(__name__)

NAME = "activity.sqlite3"
KEPT_SECONDS = 25 * 3600.0
#: Maximum rows of each table, and number of new rows after which old or surplus ones are removed.
KEPT, TIDY_EVERY = 200_000, 2000
#: Maximum entries of a reply: for one device, and for all together.
ENTRIES_MAX, ALL_ENTRIES_MAX = 4000, 40_000
EVENTS_MAX = 4000
#: States in the record alone: of a dead daemon's session that may be recovered, and of a gone one.
AWAY, ENDED = "away", "ended"

#: Texts of the events that users other than a session's owner may see.
_FOR_ALL = {
    "suspended": "Suspended.",
    "resumed": "Resumed.",
    "swapped_out": "Moved to disk.",
    "migrated": "Moved to another GPU.",
    "failed": "Failed.",
    "lost": "The GPU process or the daemon ended.",
}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (
    id TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL,
    memory_total INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY,
    uid INTEGER NOT NULL,
    owner TEXT NOT NULL,
    name TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS changes (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    session TEXT NOT NULL,
    device TEXT NOT NULL,
    state TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS changes_by_session ON changes (session, number);
CREATE TABLE IF NOT EXISTS memory (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    device TEXT NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS memory_by_device ON memory (device, number);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    session TEXT NOT NULL,
    device TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS executed (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    session TEXT NOT NULL,
    device TEXT NOT NULL,
    seconds REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS alive (only INTEGER PRIMARY KEY CHECK (only = 0), at REAL NOT NULL);
"""
_LAST = "number IN (SELECT max(number) FROM changes GROUP BY session)"
_LIVED = """
    SELECT max(at) FROM (
        SELECT at FROM alive
        UNION SELECT * FROM (SELECT at FROM changes ORDER BY number DESC LIMIT 1)
        UNION SELECT * FROM (SELECT at FROM memory ORDER BY number DESC LIMIT 1)
        UNION SELECT * FROM (SELECT at FROM events ORDER BY number DESC LIMIT 1)
    )
"""


class ActivityStore:
    """Writes the record, shortly after each call, until `close`.

    Parameters
    ----------
    directory : Path
        Its file is readable for its owner alone. What cannot be written is lost, with one warning.
    """

    def __init__(self, directory: Path) -> None:
        self._writer = SqliteWriter(directory / NAME, _SCHEMA, "What happens")
        self._noted = 0

    def begin(self, at: float, devices: Sequence[tuple[str, str, int]], *, kept: bool) -> None:
        """Record that a daemon begins, and end what its predecessor left; see Note [Dead daemons].

        Parameters
        ----------
        at : float
            Seconds of the epoch, as everywhere here.
        devices : sequence of tuple
            Id, kind and bytes of memory of each.
        kept : bool
            True if the supervisor started this daemon as soon as the last one ended.
        """
        lived = "?" if kept else f"min(?, ({_LIVED}))"
        self._writer.put(
            "INSERT INTO changes (at, session, device, state)"
            f" SELECT max(at, {lived}), session, device, '{AWAY}' FROM changes"
            f" WHERE {_LAST} AND state NOT IN ('{AWAY}', '{ENDED}')",
            at,
        )
        self._writer.put(
            "INSERT INTO memory (at, device, bytes)"
            f" SELECT {lived}, device, 0 FROM memory"
            " WHERE number IN (SELECT max(number) FROM memory GROUP BY device) AND bytes",
            at,
        )
        self._writer.put("DELETE FROM devices WHERE id NOT IN (SELECT device FROM changes)")
        for number, (name, kind, total) in enumerate(devices):
            values = name, number, kind, total
            self._writer.put("REPLACE INTO devices VALUES (?, ?, ?, ?)", *values)
        self._tidy(at)

    def taken_over(self) -> None:
        """Record as lost the sessions that were not recovered; called once the others are back."""
        left = f"FROM changes WHERE {_LAST} AND state = '{AWAY}'"
        self._writer.put(
            "INSERT INTO events (at, kind, session, device, text)"
            f" SELECT at, 'lost', session, device, 'The daemon ended, and the session too.' {left}"
        )
        self._writer.put(
            "INSERT INTO changes (at, session, device, state)"
            f" SELECT at, session, device, '{ENDED}' {left}"
        )

    def opened(self, session: str, uid: int, owner: str, name: str) -> None:
        """Record a session, with its user's uid and name."""
        self._writer.put("REPLACE INTO sessions VALUES (?, ?, ?, ?)", session, uid, owner, name)

    def changed(self, change: Change) -> None:
        """Record that a session is in another state, or on another device."""
        self._put(
            "INSERT INTO changes (at, session, device, state) VALUES (?, ?, ?, ?)",
            change.at, change.session, change.device, change.state,
        )  # fmt: skip

    def used(self, at: float, device: str, count: int) -> None:
        """Record that so many bytes of a device are in use."""
        self._put("INSERT INTO memory (at, device, bytes) VALUES (?, ?, ?)", at, device, count)

    def executed(self, at: float, session: str, device: str, seconds: float) -> None:
        """Record how long a session has executed since the previous such call."""
        self._put(
            "INSERT INTO executed (at, session, device, seconds) VALUES (?, ?, ?, ?)",
            at, session, device, seconds,
        )  # fmt: skip

    def happened(self, at: float, kind: str, session: str, device: str, text: str) -> None:
        """Record a user-facing event of a session."""
        self._put(
            "INSERT INTO events (at, kind, session, device, text) VALUES (?, ?, ?, ?, ?)",
            at, kind, session, device, text,
        )  # fmt: skip

    def alive(self, at: float) -> None:
        """Record that the daemon is alive."""
        self._writer.put("REPLACE INTO alive VALUES (0, ?)", at)

    def close(self, at: float) -> None:
        """Write what is left, and close the file."""
        self.alive(at)
        self._writer.close()

    def _put(self, statement: str, *values: Any) -> None:
        self._writer.put(statement, *values)
        self._noted += 1
        if self._noted >= TIDY_EVERY:
            self._tidy(time.time())

    def _tidy(self, now: float) -> None:
        """Remove rows that are too old or too many, except those that are still valid."""
        self._noted = 0
        horizon = now - KEPT_SECONDS
        old = "WHERE (at < ? OR number <= (SELECT max(number) FROM {0}) - ?)"
        last = "number NOT IN (SELECT max(number) FROM {0} WHERE at < ? GROUP BY {1})"
        for table, of in (("changes", "session"), ("memory", "device")):
            self._writer.put(
                f"DELETE FROM {table} {old.format(table)} AND {last.format(table, of)}"
                f" AND {last.format(table, of)}",
                horizon, KEPT, horizon, math.inf,
            )  # fmt: skip
        for table in ("events", "executed"):
            self._writer.put(f"DELETE FROM {table} {old.format(table)}", horizon, KEPT)
        self._writer.put(
            f"DELETE FROM changes WHERE at < ? AND state = '{ENDED}' AND {_LAST}", horizon
        )
        self._writer.put(
            "DELETE FROM sessions WHERE session NOT IN"
            " (SELECT session FROM changes UNION SELECT session FROM events)"
        )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Rows:
    """Rows of the file for a period."""

    devices: list[dict[str, Any]]
    sessions: dict[str, tuple[int, str, str]]
    changes: list[Change]
    memory: dict[str, list[tuple[float, int]]]
    executed: dict[str, float]
    events: list[EventView]


def read(directory: Path, since: float, until: float, resolution: float, uid: int) -> ActivityView:
    """Return the use of the devices, as `Activity` of ``openapi.yaml``; read in a thread.

    Parameters
    ----------
    directory : Path
        Directory of the file. The file may be missing; an unreadable one is logged.
    since, until : float
        Seconds of the epoch; only about a day is kept.
    resolution : float
        Seconds: entries closer together are merged; made coarser if there would be too many.
    uid : int
        User id of the caller: names of other users' sessions are hidden from them.
    """
    since = min(max(since, until - KEPT_SECONDS), until)
    try:
        rows = _load(directory / NAME, since, until)
    except sqlite3.Error as error:
        log.warning("What happened is not known: %s cannot be read: %s", directory / NAME, error)
        rows = _Rows([], {}, [], {}, {}, [])
    used = min(max(resolution, 0.0), KEPT_SECONDS)
    most = min(ENTRIES_MAX, ALL_ENTRIES_MAX // max(1, len(rows.devices)))
    devices = [_coarser(each, used) for each in _devices(rows, since, until)]
    while used < KEPT_SECONDS and any(_entries(each) > most for each in devices):
        used = max(0.5, 2 * used)
        devices = [_coarser(each, used) for each in devices]
    names = _Names(rows.sessions, uid)
    for device in devices:
        device["held"] = [names.of(each._asdict()) for each in device["held"]]
    events = [found for each in rows.events if (found := names.of_event(each)) is not None]
    return {
        "since": since,
        "until": until,
        "resolution": used,
        "devices": cast("list[DeviceActivityView]", devices),
        "events": events[-EVENTS_MAX:],
    }


def _load(path: Path, since: float, until: float) -> _Rows:
    if not path.exists():
        return _Rows([], {}, [], {}, {}, [])
    before = "number IN (SELECT max(number) FROM {0} WHERE at < ? GROUP BY {1})"
    with opened(path) as database:
        devices = database.execute("SELECT id, kind, memory_total FROM devices ORDER BY number, id")
        sessions = database.execute("SELECT session, uid, owner, name FROM sessions")
        changes = database.execute(
            "SELECT at, session, device, state FROM changes"
            f" WHERE (at BETWEEN ? AND ?) OR {before.format('changes', 'session')} ORDER BY number",
            (since, until, since),
        )
        memory = database.execute(
            "SELECT at, device, bytes FROM memory"
            f" WHERE (at BETWEEN ? AND ?) OR {before.format('memory', 'device')} ORDER BY number",
            (since, until, since),
        )
        events = database.execute(
            "SELECT at, kind, session, device, text FROM events WHERE at BETWEEN ? AND ?"
            " ORDER BY number",
            (since, until),
        )
        # A daemon of an earlier version has not made this table.
        noted = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'executed'").fetchone()
        executed = database.execute(
            "SELECT device, sum(seconds) FROM executed WHERE at BETWEEN ? AND ? GROUP BY device"
            if noted
            else "SELECT '', 0.0 WHERE 0 BETWEEN ? AND ?",
            (since, until),
        )
        keys = ("at", "kind", "session", "device", "text")
        steps: dict[str, list[tuple[float, int]]] = {}
        for at, device, count in memory:
            steps.setdefault(device, []).append((at, count))
        return _Rows(
            [{"id": e[0], "kind": e[1], "memory_total": e[2]} for e in devices],
            {each[0]: (each[1], each[2], each[3]) for each in sessions},
            [Change(*each) for each in changes],
            steps,
            dict(executed.fetchall()),
            [cast("EventView", dict(zip(keys, each, strict=True))) for each in events],
        )


def _devices(rows: _Rows, since: float, until: float) -> list[dict[str, Any]]:
    history = Timeline(rows.changes, since, until)
    held: dict[str, list[Span]] = {}
    for span in history.spans():
        held.setdefault(span.device, []).append(span)
    queues = history.queues()
    return [
        {
            **each,
            "executed": rows.executed.get(each["id"], 0.0),
            "held": held.get(each["id"], []),
            "memory": cut(rows.memory.get(each["id"], []), since, until),
            "queue": queues.get(each["id"], [(since, 0)]),
        }
        for each in rows.devices
    ]


def _coarser(device: dict[str, Any], resolution: float) -> dict[str, Any]:
    return {
        **device,
        "held": coarser(device["held"], resolution),
        "memory": merged(device["memory"], resolution),
        "queue": merged(device["queue"], resolution),
    }


def _entries(device: dict[str, Any]) -> int:
    return sum(len(device[each]) for each in ("held", "memory", "queue"))


class _Names:
    """Owners of sessions, and their names as far as the caller may see them."""

    def __init__(self, sessions: dict[str, tuple[int, str, str]], uid: int) -> None:
        self._sessions, self._uid = sessions, uid

    def _mine(self, session: str) -> bool:
        uid = self._sessions.get(session, (-1, "", ""))[0]
        return self._uid in (uid, os.getuid(), 0)

    def of(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add name and owner to an entry about a session."""
        _, owner, name = self._sessions.get(entry["session"], (-1, "", ""))
        return {**entry, "name": name if self._mine(entry["session"]) else "", "owner": owner}

    def of_event(self, event: EventView) -> EventView | None:
        """Do the same with an event; None if only the session's owner may see it."""
        if self._mine(event["session"]):
            return cast("EventView", self.of(event))
        text = _FOR_ALL.get(event["kind"])
        return cast("EventView", self.of({**event, "text": text})) if text else None
