"""The decision log, written and read as text."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from jupyter_sing.controller import decision_log
from jupyter_sing.controller.decision_log import (
    NAME,
    DecisionEntry,
    DecisionLog,
    SavedAccounts,
    read,
    read_accounts,
)
from kernelproxy.common.errors import ControlError

ONE = "aa" * 6
OTHER = "ab" * 6


def write(directory: Path, *entries: DecisionEntry) -> None:
    found = DecisionLog(directory)
    for each in entries:
        found.note(each)
    found.close()


def entry(number: int, session: str = ONE, name: str = "one") -> DecisionEntry:
    return DecisionEntry(float(number), session, name, "grant", f"Reason {number}.")


def test_decisions_are_read_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, *[entry(number) for number in range(50)])
    write(tmp_path, entry(50), entry(51, OTHER, "other"))
    assert read(tmp_path, ONE, 100) == [entry(number) for number in range(51)]
    assert read(tmp_path, ONE, 2) == [entry(49), entry(50)]
    assert stat.S_IMODE(os.stat(tmp_path / NAME).st_mode) == 0o600


@pytest.mark.parametrize("given", [OTHER, "ab", "other"])
def test_a_session_is_found_by_id_prefix_and_name(tmp_path: Path, given: str) -> None:
    write(tmp_path, entry(1), entry(2, OTHER, "other"), entry(3))
    assert read(tmp_path, given, 5) == [entry(2, OTHER, "other")]


def test_of_several_sessions_of_a_name_the_newest_is_meant(tmp_path: Path) -> None:
    write(tmp_path, entry(1), entry(2, OTHER, "one"))
    assert read(tmp_path, "one", 5) == [entry(2, OTHER, "one")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("a", "ambiguous"),
        ("c", "unknown-session"),
        ("", "unknown-session"),
        ("%", "unknown-session"),
    ],
)
def test_unknown_and_ambiguous_sessions_are_refused(
    tmp_path: Path, given: str, reason: str
) -> None:
    with pytest.raises(ControlError) as raised:
        read(tmp_path, given, 5)
    assert raised.value.reason == "unknown-session"
    write(tmp_path, entry(1), entry(2, OTHER, "other"))
    with pytest.raises(ControlError) as raised:
        read(tmp_path, given, 5)
    assert raised.value.reason == reason


def test_only_the_last_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "KEPT", 10)
    monkeypatch.setattr(decision_log, "TIDY_EVERY", 5)
    for number in range(0, 60, 6):
        write(tmp_path, *[entry(each) for each in range(number, number + 6)])
    assert read(tmp_path, ONE, 100) == [entry(number) for number in range(50, 60)]


def test_a_failed_write_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).mkdir()
    write(tmp_path, entry(1))
    assert "cannot be written down" in caplog.text


def test_a_file_that_is_no_database_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(ControlError, match="cannot be read"):
        read(tmp_path, ONE, 5)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, entry(1))
    with sqlite3.connect(tmp_path / NAME) as database:
        before = database.execute("SELECT count(*) FROM decisions").fetchone()
    read(tmp_path, ONE, 5)
    with sqlite3.connect(tmp_path / NAME) as database:
        assert database.execute("SELECT count(*) FROM decisions").fetchone() == before


def accounts(number: int) -> SavedAccounts:
    return SavedAccounts(float(number), [ONE], {"number": number})


def test_the_last_accounts_are_read(tmp_path: Path) -> None:
    assert read_accounts(tmp_path) is None
    write(tmp_path, entry(1))
    assert read_accounts(tmp_path) is None
    found = DecisionLog(tmp_path)
    for number in range(3):
        found.keep(accounts(number))
    found.close()
    assert read_accounts(tmp_path) == accounts(2)
    assert read(tmp_path, ONE, 5) == [entry(1)]


@pytest.mark.parametrize("damage", ["UPDATE accounts SET accounts = '{'", "database", "list"])
def test_damaged_accounts_are_ignored_with_one_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = DecisionLog(tmp_path)
    found.keep(accounts(1))
    found.close()
    if damage == "database":
        (tmp_path / NAME).write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(tmp_path / NAME) as database:
            database.execute("UPDATE accounts SET accounts = '[1]'" if damage == "list" else damage)
    assert read_accounts(tmp_path) is None
    assert len(caplog.records) == 1
    assert "is forgotten" in caplog.text
