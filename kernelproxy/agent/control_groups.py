"""Control groups of Linux, which limit and count the memory of processes, as in containers.

Both versions are read; see the kernel's documents cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """The memory controller's directory of one group."""

    directory: Path
    version: int

    @property
    def kills_path(self) -> Path:
        """File with the number of out-of-memory kills, in it and below it."""
        return self.directory / ("memory.events" if self.version == 2 else "memory.oom_control")

    def limit(self) -> int | None:
        """Return the bytes that its processes may use; None if there is no limit."""
        return self._number("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    def used(self) -> int:
        """Return the bytes that its processes use, without cached files that can be dropped."""
        two = self.version == 2
        used = self._number("memory.current" if two else "memory.usage_in_bytes") or 0
        cached = f"{'' if two else 'total_'}inactive_file "
        for line in self._text("memory.stat").splitlines():
            if line.startswith(cached):
                used -= int(line.removeprefix(cached))
        return max(0, used)

    def _number(self, name: str) -> int | None:
        text = self._text(name).strip()
        return int(text) if text.isdigit() else None  # "max"

    def _text(self, name: str) -> str:
        try:
            return (self.directory / name).read_text()
        except OSError:
            return ""


def own_groups(pid: int, mount: Path = MOUNT) -> list[MemoryGroup]:
    """Return where the memory group of a process may be, by what /proc says; some do not exist."""
    found = []
    for line in _groups_of(pid).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        path = path.lstrip("/")
        if number == "0" and not controllers:
            places = (mount / path, mount / "unified" / path)
            found += [MemoryGroup(each, 2) for each in places]
        elif "memory" in controllers.split(","):
            # In a container its own group is mounted as the root of all.
            places = (mount / "memory" / path, mount / "memory")
            found += [MemoryGroup(each, 1) for each in places]
    return found


def memory_limit(mount: Path = MOUNT) -> int | None:
    """Return the bytes that this process's groups may use; None if there is no limit."""
    limits = [limit for each in _limiting(mount) if (limit := each.limit()) is not None]
    return min(limits, default=None)


def memory_left(mount: Path = MOUNT) -> int | None:
    """Return the bytes that this process's groups may still use; None if there is no limit."""
    left = [
        max(0, limit - each.used())
        for each in _limiting(mount)
        if (limit := each.limit()) is not None
    ]
    return min(left, default=None)


def _limiting(mount: Path) -> Iterator[MemoryGroup]:
    """Return this process's groups and those above them."""
    for own in own_groups(os.getpid(), mount):
        directory = own.directory
        while directory != mount and mount in directory.parents:
            yield MemoryGroup(directory, own.version)
            directory = directory.parent
        if own.version == 2:
            yield MemoryGroup(mount, 2)


def _groups_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:  # it has ended, or its groups may not be read
        return ""
