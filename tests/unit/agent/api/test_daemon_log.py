"""The daemon's log is bounded, for all processes that write to it."""

from __future__ import annotations

import os
from pathlib import Path

from kernelproxy.agent.api.daemon_log import bound


def test_a_log_that_is_too_large_begins_anew_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    with open(path, "ab", 0) as ours, open(path, "ab", 0) as others:
        ours.write(b"a" * 50 + b"b" * 100)
        assert not bound(path, ours.fileno(), 150)
        assert bound(path, ours.fileno(), 100)
        others.write(b"c")  # other writers continue at the beginning
        ours.write(b"d")
    assert path.read_bytes() == b"cd"
    assert (tmp_path / "agent.log.old").read_bytes() == b"b" * 100


def test_a_log_whose_end_cannot_be_kept_is_bounded_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "agent.log.old").mkdir()
    with open(tmp_path / "agent.log", "ab", 0) as log:
        log.write(b"a" * 101)
        assert bound(tmp_path / "agent.log", log.fileno(), 100)
    assert (tmp_path / "agent.log").read_bytes() == b""


def test_a_log_path_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    assert not bound(tmp_path / "agent.log", writing, 0)
    os.close(reading)
    os.close(writing)
