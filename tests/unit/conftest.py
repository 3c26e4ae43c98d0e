"""Fixtures of the unit tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.session.arena import Arena, MakeArena
from tests.unit.fake_daemon import SESSION, FakeDaemon


@pytest.fixture
def fake_daemon(runtime_dir: Path) -> Iterator[FakeDaemon]:
    """A fake daemon with one session, where this test looks for its daemon."""
    daemon = FakeDaemon(runtime_dir / "agent.sock")
    daemon.sessions[SESSION["id"]] = SESSION.copy()
    try:
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def make_arena() -> Iterator[MakeArena]:
    arenas: list[Arena] = []

    def make(*ranges: bytes) -> Arena:
        arena = Arena()
        arenas.append(arena)
        for raw in ranges:
            arena.add(raw)
        return arena

    yield make
    for arena in arenas:
        os.close(arena.fd)
