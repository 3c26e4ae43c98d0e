"""Process ids in the views of sessions, which have none while there is no process."""

from __future__ import annotations


def existing(pid: int | None) -> int:
    """Return the id of a process that there is."""
    assert pid is not None
    return pid
