"""Detection of out-of-memory kills by the system, as far as it counts them.

A control group counts the processes in it, and below it, that were ended for lack of memory. Where
no group can be read (a process in the root group), the count of the whole machine is used instead.
"""

from __future__ import annotations

from pathlib import Path

from kernelproxy.agent.control_groups import MOUNT, own_groups

_MACHINE = Path("/proc/vmstat")


class OomKills:
    """Out-of-memory kills in a process's control group since this object was made.

    Parameters
    ----------
    pid : int
        The process, which is alive.
    groups, machine : Path, optional
        Mount point of the control groups; file with the counts of the machine.
    """

    def __init__(self, pid: int, groups: Path = MOUNT, machine: Path = _MACHINE) -> None:
        self._files = [*(each.kills_path for each in own_groups(pid, groups)), machine]
        self._path, self._before = next(
            ((path, count) for path in self._files if (count := _count(path)) is not None),
            (machine, 0),
        )

    def happened(self) -> bool:
        """Return True if there was one."""
        return (_count(self._path) or 0) > self._before


def _count(path: Path) -> int | None:
    """Return the number of kills in a file of names and numbers; None if it has none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    counts = [line.split() for line in lines if line.startswith("oom_kill ")]
    return int(counts[0][1]) if counts and counts[0][1].isdigit() else None
