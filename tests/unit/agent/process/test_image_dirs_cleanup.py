"""Directories of process images: those that a daemon removes at its start, and those it keeps."""

from __future__ import annotations

from pathlib import Path

from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.process.image_dirs import ImageDirs


def test_leftovers_of_dead_agents_are_removed_and_images_in_use_stay(tmp_path: Path) -> None:
    root, mark = tmp_path / "processes", DaemonId(tmp_path / "runtime")
    dead = ImageDirs(root, mark)
    left, kept = dead.make("left"), dead.make("kept")
    images = ImageDirs(root, mark)  # of the next agent
    made = images.make("made")  # before the cleanup thread has reached it
    images.tidy([kept])
    assert (left.exists(), kept.exists(), made.exists()) == (False, True, True)
    images.remove(made)
    assert not made.exists()
