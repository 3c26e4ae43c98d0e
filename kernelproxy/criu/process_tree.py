"""A process and the processes that it has started, as seen from outside their sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants; if some end meanwhile, others may be missing."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in (task / "children").read_text("ascii").split():
                yield from tree(int(child))


def is_within(pid: int, ancestor: int) -> bool:
    """Return True if a process is another one, or descends from it.

    Unlike `tree`, it misses no process while others end.
    """
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(status(pid)["PPid"])
        except (OSError, KeyError):  # it has ended
            return False
    return False


def shared_memory(pids: Iterable[int]) -> str | None:
    """Return the name of a memfd that several of these processes have mapped; None: there is none.

    Raises
    ------
    OSError
        If a process has ended.
    """
    found: dict[str, tuple[int, str]] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text("utf-8", errors="replace").splitlines():
            _, rights, _, device, inode, *name = line.split(maxsplit=5)
            if rights.endswith("s") and name and name[0].startswith("/memfd:"):
                first, _ = found.setdefault(f"{device} {inode}", (pid, name[0]))
                if first != pid:
                    return name[0].removeprefix("/memfd:").removesuffix(" (deleted)")
    return None


def status(pid: int) -> dict[str, str]:
    """Return the fields of a process's ``/proc/PID/status``.

    Raises
    ------
    OSError
        If there is no such process.
    """
    text = Path(f"/proc/{pid}/status").read_text("utf-8", errors="replace")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def numbers(pid: int) -> list[int]:
    """Return the process ids of a process in all namespaces, from ours inwards; raises OSError."""
    return [int(each) for each in status(pid)["NSpid"].split()]
