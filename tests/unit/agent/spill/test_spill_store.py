"""States on disk that a daemon removes at its start, since no process can use them any more."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.spill.spill_store import TABLES, SpillStore
from kernelproxy.storage.manifest import Label


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "states"


def daemon(store: Path, runtime: Path) -> SpillStore:
    """Return the states of a daemon; they count as in use if a process holds its lock."""
    runtime.mkdir(exist_ok=True)
    (runtime / "agent.lock").touch()
    return SpillStore(store, 1 << 30, DaemonId(runtime))


def put(states: SpillStore, label: Label) -> None:
    fd = os.memfd_create("nothing")
    try:
        states.store().put(label, fd, [], blobs={TABLES: b"tables"})
    finally:
        os.close(fd)


def spill(states: SpillStore, session: str) -> None:
    put(states, states.label(session, "digits.ipynb", 7, "ada", "", "software", 0))


def names(states: SpillStore) -> list[str]:
    return sorted(name for _, name in states.store().names())


def test_of_its_own_those_stay_that_sessions_have(store: Path, tmp_path: Path) -> None:
    before = daemon(store, tmp_path / "one")
    for session in ("adopted", "forgotten"):
        spill(before, session)
    now = daemon(store, tmp_path / "one")
    spill(now, "new")
    now.tidy(["adopted"])
    assert names(now) == ["adopted", "new"]


def test_states_of_another_daemon_stay_as_long_as_it_lives(store: Path, tmp_path: Path) -> None:
    spill(daemon(store, tmp_path / "other"), "theirs")
    ours = daemon(store, tmp_path / "one")
    lock = os.open(tmp_path / "other" / "agent.lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours.tidy([])
        assert names(ours) == ["theirs"]
    finally:
        os.close(lock)
    ours.tidy([])
    assert names(ours) == []
    assert list(store.glob("chunks/*/*")) == []


def test_unknown_files_and_states_stay(store: Path, tmp_path: Path) -> None:
    states = daemon(store, tmp_path / "one")
    put(states, Label("7-checkpoints", "mine", "checkpoint", "", "software"))
    put(states, Label("7", "unmarked", "session", "", "software"))
    states.tidy([])
    assert names(states) == ["mine", "unmarked"]


def test_without_a_store_none_is_made(store: Path, tmp_path: Path) -> None:
    daemon(store, tmp_path / "one").tidy([])
    assert not store.exists()
