"""Preferences of sessions that have closed: the next session of the same kernel gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproxy.agent.session import preferences
from kernelproxy.agent.session.preferences import RememberedPreferences

PINNED = {"pinned": True, "tier": None, "deterministic": False}
BASIC = {"pinned": False, "tier": "basic", "deterministic": True}


def test_another_daemon_remembers_it_once(tmp_path: Path) -> None:
    path = tmp_path / "wanted.json"
    RememberedPreferences(path).keep(7, "k-1", PINNED)
    RememberedPreferences(path).keep(7, "k-2", BASIC)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RememberedPreferences(path).take(8, "k-1") is None
    assert RememberedPreferences(path).take(7, "k-1") == PINNED
    assert RememberedPreferences(path).take(7, "k-1") is None
    assert RememberedPreferences(path).take(7, "k-2") == BASIC


def test_the_oldest_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "REMEMBERED_MAX", 2)
    remembered = RememberedPreferences(tmp_path / "wanted.json")
    for kernel in ("k-1", "k-2", "k-1", "k-3"):
        remembered.keep(7, kernel, PINNED)
    assert [remembered.take(7, each) for each in ("k-1", "k-2", "k-3")] == [PINNED, None, PINNED]


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[" * 200_000, b"[]", b'{"7 k": 1}', b'{"7 k": {}}']
)
def test_a_damaged_file_is_as_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "wanted.json"
    path.write_bytes(text)
    assert RememberedPreferences(path).take(7, "k") is None


def test_preferences_that_cannot_be_written_are_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remembered = RememberedPreferences(tmp_path / "nowhere" / "wanted.json")
    remembered.keep(7, "k-1", PINNED)
    assert "may be forgotten" in caplog.text
    assert remembered.take(7, "k-1") == PINNED
