"""Runs a command as an ordinary user without any capability; root calls it with the paths to read.

    python as_user.py [--uid UID] [--no-namespaces] PATH... -- COMMAND...

Interpreters and clones may be in directories that only root can read, such as root's home. For
this command alone, such directories are replaced by empty ones that every user can read, and that
contain only these paths. With ``--uid 0``, the command runs as root, with the capabilities that
container runtimes leave; with ``--no-namespaces``, where no process may create a user namespace.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38
#: Docker's default capabilities of root.
CONTAINER = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}

libc = ctypes.CDLL(None, use_errno=True)


def call(result: int) -> None:
    """Raise the error of a failed system call."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()))


def closed(path: Path) -> Path | None:
    """Return the first directory on the way to a path that not every user can enter, or None."""
    for parent in [*reversed(path.parents)][1:]:
        if not parent.stat().st_mode & 0o001:
            return parent
    return None


def entered(path: Path) -> list[Path]:
    """Return the path; or its entries, if it is a directory that not every user can enter."""
    if path.is_dir() and not path.stat().st_mode & 0o001:
        return [*path.iterdir()]
    return [path]


def open_up(paths: list[Path]) -> None:
    """Let every user reach these paths."""
    call(libc.unshare(CLONE_NEWNS))
    mount("", "/", "", MS_REC | MS_SLAVE)
    # Before mounts hide them.
    found = {
        each: os.open(each, os.O_PATH | os.O_NOFOLLOW) for path in paths for each in entered(path)
    }
    hidden = {parent for path in found if (parent := closed(path)) is not None}
    for parent in sorted(hidden):
        mount("none", str(parent), "tmpfs", 0, "mode=755")
    for path, fd in found.items():
        if hidden.isdisjoint(path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = os.fstat(fd).st_mode
        if stat.S_ISLNK(kind):
            path.symlink_to(os.readlink("", dir_fd=fd))
            continue
        path.mkdir(exist_ok=True) if stat.S_ISDIR(kind) else path.touch()
        mount(f"/proc/self/fd/{fd}", str(path), "", MS_BIND | MS_REC)


def drop_rights(user: int) -> None:
    """Become another user, permanently."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in {*range(last + 1)} - (CONTAINER if user == 0 else set()):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    call(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # otherwise root would own its files in /proc


def forbid_namespaces(user: int) -> None:
    """Enter a user namespace in which no other one can be created."""
    call(libc.unshare(CLONE_NEWUSER))
    for name, text in (("setgroups", "deny"), ("gid_map", None), ("uid_map", None)):
        Path(f"/proc/self/{name}").write_text(text or f"{user} {user} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int, default=NOBODY)
    parser.add_argument("--no-namespaces", action="store_true")
    parser.add_argument("paths", nargs="*", type=Path)
    at = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:at])
    open_up([path.resolve() for path in options.paths])
    drop_rights(options.uid)
    if options.no_namespaces:
        forbid_namespaces(options.uid)
    return subprocess.call(sys.argv[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
