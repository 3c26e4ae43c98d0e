"""Export and restore of the engine's history, so that the next engine continues from there.

The document is JSON, and has no clock: times are ages, in seconds before the export. Leases,
reservations and positions in the queue are not part of it: sessions that still need a device
request it again, and continue at the level that their cell had.

- ``version``: 1; any other is refused
- ``token``: the last one that was given
- ``turn``: moving average of how long leases last
- ``violations``: hours of sessions in which their tier was missed
- ``reached``: virtual time of the virtual clusters, and the furthest of their tags
- ``clusters``: ``vc``, ``tag``, ``served``, ``day``, and ``reached`` of its users
- ``users``: the same with ``user``, ``burst`` (age, seconds), and ``reached`` of its sessions
- ``sessions``: open ones: ``session``, ``vc``, ``user``, ``tag``, ``served``; ``attained`` by its
  cell, and how long it has ``waited``; ``hour``; what its last ``switch`` took; ``gap`` between
  cells, and how long it is ``idle``
- ``devices``: ``device``, ``bytes_per_second``, ``constant_seconds``, and ``swaps`` left

``day`` is a list of [age, device seconds], ``hour`` of [age, demand, granted].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger, Siblings
from jupyter_sing.scheduler.fairness.quotas import DAY, SLOT
from jupyter_sing.scheduler.fairness.tier_targets import WINDOW
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase

VERSION = 1
LARGEST = 1e15
"""Larger numbers are mistakes: a million devices do not serve this many seconds in a century."""

Document: TypeAlias = dict[str, Any]


class AccountsError(ValueError):
    """The document is not an account of an engine, or has another version."""


@dataclass(frozen=True, slots=True)
class SessionHistory:
    """History of a session that was open before; `at` is when that was read."""

    at: float
    entry: Document

    def apply(self, session: EngineSession, now: float) -> None:
        """Restore the history of a session that is opened again."""
        entry, passed = self.entry, now - self.at
        flow = session.flow
        assert flow.parent
        assert flow.parent.parent
        flow.served = entry["served"]
        if (flow.parent.parent.name, flow.parent.name) == (entry["vc"], entry["user"]):
            flow.tag = entry["tag"]
        session.account.restore([(age + passed, d, g) for age, d, g in entry["hour"]], now)
        session.gaps.restore(entry["gap"], now - entry["idle"] - passed)
        session.attained, session.wait.waited = entry["attained"], entry["waited"]
        session.lease.switch = entry["switch"]
        session.wait.resumes = session.attained > 0.0 or session.wait.waited > 0.0

    def aged(self, now: float) -> Document:
        """Return the entry for the next export."""
        passed = now - self.at
        hour = [[age + passed, d, g] for age, d, g in self.entry["hour"] if age + passed < WINDOW]
        return {**self.entry, "hour": hour, "idle": self.entry["idle"] + passed}


def export(
    *,
    token: int,
    turn: float,
    violations: int,
    ledger: ServiceLedger,
    sessions: Iterable[EngineSession],
    past: Iterable[SessionHistory],
    devices: Iterable[EngineDevice],
    now: float,
) -> Document:
    """Return the history as a document."""
    clusters = [flow for flow in ledger.flows() if flow.parent is None]
    users = [flow for flow in ledger.flows() if flow.parent is not None]
    return {
        "version": VERSION,
        "token": token,
        "turn": turn,
        "violations": violations,
        "reached": list(ledger.root.times(now)),
        "clusters": [{"vc": flow.name, **_flow(flow, now)} for flow in clusters],
        "users": [
            {
                "vc": flow.parent.name,
                "user": flow.name,
                **_flow(flow, now),
                "burst": [now - flow.burst_at, flow.burst],
            }
            for flow in users
            if flow.parent
        ],
        "sessions": [
            *(_session(session, now) for session in sessions),
            *(known.aged(now) for known in past if now - known.at < WINDOW),
        ],
        "devices": [
            {
                "device": device.id,
                "bytes_per_second": device.bytes_per_second,
                "constant_seconds": device.constant_seconds,
                "swaps": device.budget.left(now),
            }
            for device in devices
        ],
    }


def _flow(flow: Flow, now: float) -> Document:
    flow.settle(now)
    assert flow.day
    flow.day.used(now)
    return {
        "tag": flow.tag,
        "served": flow.served,
        "reached": list(flow.children.times(now)),
        # Use the middle of the slot: a clock with another offset assigns it to the same slot,
        # within half a slot.
        "day": [[max(0.0, now - (at + 0.5) * SLOT), used] for at, used in flow.day.slots()],
    }


def _session(session: EngineSession, now: float) -> Document:
    flow = session.flow
    assert flow.parent
    assert flow.parent.parent
    flow.settle(now)
    session.account.settle(now)
    busy = session.phase is not Phase.IDLE or session.wait.resumes
    waits = session.phase in (Phase.WAITING, Phase.RESERVED)
    waited = now - session.wait.since if waits else 0.0
    mean, since = session.gaps.known
    return {
        "session": session.id,
        "vc": flow.parent.parent.name,
        "user": flow.parent.name,
        "tag": flow.tag,
        "served": flow.served,
        "attained": session.attained_at(now) if busy else 0.0,
        "waited": session.wait.waited if session.wait.resumes else waited,
        "hour": [[max(0.0, now - at), *seconds] for at, *seconds in session.account.slots()],
        "switch": session.lease.switch,
        "gap": mean,
        "idle": max(0.0, now - since),
    }


@dataclass(frozen=True, slots=True)
class RestoredAccounts:
    """Restored values that are not part of flows or devices."""

    token: int
    turn: float
    violations: int
    sessions: dict[str, SessionHistory]


def restore(
    document: object,
    ledger: ServiceLedger,
    devices: dict[str, EngineDevice],
    settings: EngineSettings,
    now: float,
) -> RestoredAccounts:
    """Restore the document of an earlier engine into an empty ledger and into devices.

    Raises
    ------
    AccountsError
        With the place and what is wrong there.
    """
    if not isinstance(document, dict):
        raise AccountsError("The accounts are no object with a version.")
    version = document.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise AccountsError(
            f"The accounts are of version {str(version)[:20]}, and this scheduler reads version"
            f" {VERSION}: begin without them, or use the version that wrote them."
        )
    top = _Entry(document, "accounts")
    _times(top, ledger.root)
    for entry in top.entries("clusters"):
        vc = entry.text("vc")
        _restore_flow(entry, ledger.cluster(vc, settings.vc_weights.get(vc, 1.0)), now)
    for entry in top.entries("users"):
        vc, user = entry.text("vc"), entry.text("user")
        vc_weight = settings.vc_weights.get(vc, 1.0)
        weight = settings.user_weights.get((vc, user), 1.0)
        flow = ledger.user(vc, user, vc_weight, weight)
        _restore_flow(entry, flow, now)
        age, flow.burst = entry.numbers("burst", 2)
        flow.burst_at = now - age
    for entry in top.entries("devices"):
        device = devices.get(entry.text("device"))
        rate, constant = entry.number("bytes_per_second"), entry.number("constant_seconds")
        swaps = entry.number("swaps", -LARGEST)
        if device is not None and rate > 0.0:
            device.bytes_per_second, device.constant_seconds = rate, constant
            device.budget.restore(swaps, now)
    past = {}
    for entry in top.entries("sessions"):
        known = _restore_session(entry)
        past[known["session"]] = SessionHistory(now, known)
    return RestoredAccounts(
        int(top.number("token")), top.number("turn"), int(top.number("violations")), past
    )


def _restore_flow(entry: _Entry, flow: Flow, now: float) -> None:
    flow.tag, flow.served, flow.since = entry.number("tag"), entry.number("served"), now
    _times(entry, flow.children)
    assert flow.day
    slots: dict[int, float] = {}
    for age, seconds in entry.rows("day", 2):
        slot = math.floor((now - age) / SLOT)
        if age < DAY + SLOT:
            slots[slot] = slots.get(slot, 0.0) + seconds
    for slot, seconds in sorted(slots.items()):
        flow.day.put(slot, seconds)


def _restore_session(entry: _Entry) -> Document:
    return {
        **{key: entry.text(key) for key in ("session", "vc", "user")},
        **{
            key: entry.number(key)
            for key in ("tag", "served", "attained", "waited", "switch", "gap", "idle")
        },
        "hour": entry.rows("hour", 3),
    }


def _times(entry: _Entry, siblings: Siblings) -> None:
    siblings.restore(*entry.numbers("reached", 2))


class _Entry:
    """Object of the document; raises `AccountsError` if a value is missing or invalid."""

    def __init__(self, values: dict[Any, Any], where: str) -> None:
        self._values = values
        self._where = where

    def _refuse(self, key: str, wanted: str) -> AccountsError:
        return AccountsError(
            f"The accounts cannot be read: {self._where}.{key} is not {wanted}. Begin without them."
        )

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self._refuse(key, "a text")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        value: Any = self._values.get(key)
        if not _is_number(value, least):
            raise self._refuse(key, f"a number {'from 0 ' if least == 0.0 else ''}below 1e15")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        (row,) = self._rows(key, [self._values.get(key)], count)
        return row

    def rows(self, key: str, count: int) -> list[tuple[float, ...]]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise self._refuse(key, "a list")
        return list(self._rows(key, value, count))

    def _rows(self, key: str, rows: list[Any], count: int) -> Iterator[tuple[float, ...]]:
        for row in rows:
            if (
                not isinstance(row, list | tuple)
                or len(row) != count
                or not all(_is_number(value) for value in row)
            ):
                raise self._refuse(key, f"made of {count} numbers from 0 below 1e15")
            yield tuple(float(value) for value in row)

    def entries(self, key: str) -> Iterator[_Entry]:
        values = self._values.get(key)
        if not isinstance(values, list):
            raise self._refuse(key, "a list")
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self._refuse(f"{key}[{index}]", "an object")
            yield _Entry(value, f"{self._where}.{key}[{index}]")


def _is_number(value: object, least: float = 0.0) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and least <= value < LARGEST
    )
