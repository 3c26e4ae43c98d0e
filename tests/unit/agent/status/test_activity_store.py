"""The activity record of the last day: it is read as written, whatever happens to its daemon."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.agent.status import activity_store
from kernelproxy.agent.status.activity_store import KEPT_SECONDS, NAME, ActivityStore, read
from kernelproxy.agent.status.timeline import Change
from kernelproxy.common.protocol.views import ActivityView

DEVICES = [("cpu:0", "software", 1 << 30), ("cpu:1", "software", 2 << 30)]
NOW = 1_800_000_000.0
UID = 4321


def begun(directory: Path, at: float = NOW, *, kept: bool = False) -> ActivityStore:
    record = ActivityStore(directory)
    record.begin(at, DEVICES, kept=kept)
    record.taken_over()
    return record


def change(
    record: ActivityStore, at: float, state: str, session: str = "a", device: str = "cpu:0"
) -> None:
    record.changed(Change(NOW + at, session, device, state))


def found(directory: Path, until: float, resolution: float = 0.0, uid: int = UID) -> ActivityView:
    return read(directory, NOW, NOW + until, resolution, uid)


def held(directory: Path, until: float, resolution: float = 0.0) -> list[tuple[Any, ...]]:
    return [
        (each["session"], each["device"], each["state"], each["start"] - NOW, each["end"] - NOW)
        for device in found(directory, until, resolution)["devices"]
        for each in device["held"]
    ]


def kinds(directory: Path, until: float = 1000.0) -> list[tuple[str, str]]:
    return [(each["kind"], each["session"]) for each in found(directory, until)["events"]]


def test_recorded_activity_is_read_back(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.opened("a", UID, "ada", "digits.ipynb")
    change(record, 1, "unused")
    change(record, 2, "running")
    record.used(NOW + 3, "cpu:0", 500)
    record.executed(NOW - 1, "a", "cpu:0", 9.0)  # before that time
    record.executed(NOW + 3, "a", "cpu:0", 0.5)
    record.executed(NOW + 4, "b", "cpu:0", 0.25)
    change(record, 4, "queued", device="cpu:1")
    change(record, 6, "running", device="cpu:1")
    record.happened(NOW + 6, "migrated", "a", "cpu:1", "Moved from cpu:0 to cpu:1.")
    record.close(NOW + 7)
    answer: dict[str, Any] = {**found(tmp_path, 10)}
    first, second = answer.pop("devices")
    span = {"session": "a", "name": "digits.ipynb", "owner": "ada", "state": "running"}
    assert first == {
        "id": "cpu:0", "kind": "software", "memory_total": 1 << 30,
        "executed": 0.75,
        "held": [span | {"device": "cpu:0", "start": NOW + 2, "end": NOW + 4, "seconds": 2.0}],
        "memory": [(NOW, 0), (NOW + 3, 500)],
        "queue": [(NOW, 0)],
    }  # fmt: skip
    late = {"device": "cpu:1", "start": NOW + 6, "end": NOW + 10, "seconds": 4.0}
    assert second["held"] == [span | late]
    assert second["executed"] == 0.0
    assert second["queue"] == [(NOW, 0), (NOW + 4, 1), (NOW + 6, 0)]
    event = {
        "at": NOW + 6, "kind": "migrated", "session": "a", "name": "digits.ipynb", "owner": "ada",
        "device": "cpu:1", "text": "Moved from cpu:0 to cpu:1.",
    }  # fmt: skip
    assert answer == {"since": NOW, "until": NOW + 10, "resolution": 0.0, "events": [event]}
    assert stat.S_IMODE(os.stat(tmp_path / NAME).st_mode) == 0o600


def test_an_empty_record_reads_as_empty(tmp_path: Path) -> None:
    nothing = {"since": NOW, "until": NOW + 9, "resolution": 0.0, "devices": [], "events": []}
    assert found(tmp_path, 9) == nothing
    assert list(tmp_path.iterdir()) == []


def test_open_spans_of_a_dead_daemon_end_at_its_last_sign_of_life(tmp_path: Path) -> None:
    record = begun(tmp_path)
    change(record, 1, "running", "a")
    change(record, 2, "idle", "b")
    change(record, 3, "suspended", "c")
    change(record, 4, "ended", "d")
    record.used(NOW + 4, "cpu:0", 7)
    record.alive(NOW + 5)
    record._writer.close()  # killed
    begun(tmp_path, NOW + 100).close(NOW + 101)
    assert held(tmp_path, 200) == [("a", "cpu:0", "running", 1, 5), ("b", "cpu:0", "idle", 2, 5)]
    assert kinds(tmp_path) == [("lost", "a"), ("lost", "b"), ("lost", "c")]
    devices: Any = found(tmp_path, 200)["devices"]
    (device, _) = devices
    assert device["memory"] == [(NOW, 0), (NOW + 4, 7), (NOW + 5, 0)]
    begun(tmp_path, NOW + 150).close(NOW + 151)  # and nothing is lost twice
    assert len(kinds(tmp_path)) == 3


def test_sessions_that_the_next_agent_takes_over_continue(tmp_path: Path) -> None:
    record = begun(tmp_path)
    for session in ("a", "b"):
        change(record, 1, "running", session)
    record._writer.close()
    record = ActivityStore(tmp_path)
    record.begin(NOW + 10, DEVICES, kept=True)  # its supervisor has seen the end
    change(record, 11, "unused", "a")
    record.taken_over()
    change(record, 12, "running", "a")
    record.close(NOW + 20)
    assert held(tmp_path, 20) == [
        ("a", "cpu:0", "running", 1, 10),
        ("b", "cpu:0", "running", 1, 10),
        ("a", "cpu:0", "running", 12, 20),
    ]
    assert kinds(tmp_path) == [("lost", "b")]


def test_activity_older_than_a_day_is_deleted_except_open_spans(tmp_path: Path) -> None:
    record = begun(tmp_path)
    for session, state in (("old", "ended"), ("resting", "idle")):
        record.opened(session, UID, "ada", session)
        change(record, 1, "running", session)
        change(record, 2, state, session)
        record.happened(NOW + 2, "suspended", session, "cpu:0", "Text.")
    record.used(NOW + 1, "cpu:0", 1)
    record.used(NOW + 2, "cpu:0", 2)
    record._tidy(NOW + KEPT_SECONDS + 100)
    record.close(NOW + KEPT_SECONDS + 101)
    with sqlite3.connect(tmp_path / NAME) as database:
        for table, left in (("changes", 1), ("memory", 1), ("events", 0), ("sessions", 1)):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (left,), table
    later = NOW + KEPT_SECONDS + 200
    (span,) = read(tmp_path, 0.0, later, 1.0, UID)["devices"][0]["held"]
    assert (span["session"], span["start"], span["end"]) == ("resting", later - KEPT_SECONDS, later)


def test_the_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_store, "KEPT", 20)
    monkeypatch.setattr(activity_store, "TIDY_EVERY", 10)
    record = begun(tmp_path)
    change(record, 0, "idle", "resting")
    for index in range(100):
        change(record, index, "running" if index % 2 else "idle")
        record.used(NOW + index, "cpu:0", index)
        record.happened(NOW + index, "suspended", "a", "cpu:0", "Text.")
    record.close(NOW + 100)
    with sqlite3.connect(tmp_path / NAME) as database:
        for table in ("changes", "memory", "events"):
            (count,) = database.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert count <= 20 + 10 + 1
    assert held(tmp_path, 200)[0] == ("resting", "cpu:0", "idle", 0, 200)


def test_so_much_is_answered_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_store, "ENTRIES_MAX", 50)
    monkeypatch.setattr(activity_store, "EVENTS_MAX", 50)
    record = begun(tmp_path)
    record.opened("a", UID, "ada", "digits.ipynb")
    for index in range(1000):
        change(record, index, "running" if index % 2 else "idle")
        record.happened(NOW + index, "suspended", "a", "cpu:0", f"Text {index}.")
    record.close(NOW + 1000)
    answer = found(tmp_path, 1000)
    (device, _) = answer["devices"]
    assert 1 <= len(device["held"]) <= 50
    assert answer["resolution"] > 1
    assert answer["events"][-1]["text"] == "Text 999."
    assert len(answer["events"]) == 50


def test_names_of_other_users_sessions_are_hidden(tmp_path: Path) -> None:
    record = begun(tmp_path)
    record.opened("a", UID, "ada", "digits.ipynb")
    change(record, 1, "running")
    for kind in ("suspended", "checkpoint", "restored", "migrated"):
        record.happened(NOW + 2, kind, "a", "cpu:0", f"{kind} of digits.ipynb")
    record.close(NOW + 3)
    for uid in (UID, 0, os.getuid()):
        answer = found(tmp_path, 5, uid=uid)
        assert answer["devices"][0]["held"][0]["name"] == "digits.ipynb"
        assert len(answer["events"]) == 4
    if os.getuid() == 0:  # the server's user sees everything: another user asks
        answer = found(tmp_path, 5, uid=UID + 1)
        (span,) = answer["devices"][0]["held"]
        assert (span["name"], span["owner"]) == ("", "ada")
        assert [each["kind"] for each in answer["events"]] == ["suspended", "migrated"]
        assert "digits" not in repr(answer)


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).write_bytes(b"no database" * 1000)
    assert found(tmp_path, 9)["devices"] == []
    assert "cannot be read" in caplog.text
    caplog.clear()
    record = begun(tmp_path)
    change(record, 1, "running")
    record.close(NOW + 2)
    assert held(tmp_path, 2) == [("a", "cpu:0", "running", 1, 2)]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "put aside" in caplog.text
    assert (tmp_path / f"{NAME}.damaged").read_bytes().startswith(b"no database")


def test_a_failed_write_stops_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).mkdir()
    record = begun(tmp_path)
    for index in range(100):
        change(record, index, "running")
    record.close(NOW)
    assert caplog.text.count("cannot be written down") == 1


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    record = begun(tmp_path)
    change(record, 1, "running")
    record.close(NOW + 2)
    with sqlite3.connect(tmp_path / activity_store.NAME) as database:
        database.execute("DROP TABLE executed")
    database.close()
    assert held(tmp_path, 2) == [("a", "cpu:0", "running", 1, 2)]
    assert found(tmp_path, 2)["devices"][0]["executed"] == 0.0
