"""Directories from which something is loaded: nobody but their user and root may have made them.

Libraries, checkpoints, policies and sockets are believed by where they lie. So on the whole way
from ``/`` to them no directory, and no symbolic link, may be another user's, and none may be one in
which others can replace something. Standard library only.

Note [Nobody]: in a namespace of users that has no number for the machine's root, what is root's
looks like what is anybody else's. So there such a file is believed only where nobody but root makes
any, and such a directory only if it does not lie where everybody may make some.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from kernelproxy.common.errors import ControlError

_LINKS_MAX = 40
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
#: Where nobody but root makes files; see Note [Nobody].
_ROOTS_ALONE = tuple(map(Path, ("/etc", "/usr", "/var/cache/jupyter-sing", "/run/jupyter-sing")))


def own_directory(directory: Path, remedy: str, *, shared: bool = False) -> Path:
    """Make a directory for its user alone, or check that nobody else could have filled it.

    Parameters
    ----------
    directory : Path
        Absolute. What is missing on the way is made, too.
    remedy : str
        What a user can do if it is refused, for people: ``set NAME``.
    shared : bool
        Whether it may be root's, too.

    Raises
    ------
    ControlError
        If it or what is above it is another user's, or may be written by others (reason
        ``unsafe-directory``).
    OSError
        If it cannot be made.
    """
    *above, (path, found) = _way(directory, make=True)
    _check_above(above, directory, remedy)
    if found.st_uid not in ({os.getuid(), 0} if shared else {os.getuid()}):
        raise _refusal(path, found, directory, remedy)
    if found.st_mode & _WRITABLE and not _only_by_us(found):
        raise ControlError(
            f"{path} may be written by others: chmod 700 it and remove what is not yours, or "
            f"{remedy}.",
            "unsafe-directory",
        )
    return directory


def check_file(file: Path, remedy: str) -> None:
    """Check that nobody else could have written a file.

    Raises
    ------
    ControlError
        As `own_directory`; or nobody can tell whether it is root's or another user's (reason
        ``unknown-owner``, see Note [Nobody]).
    OSError
        If there is none.
    """
    *above, (path, found) = _way(file, make=False)
    _check_above(above, file, remedy)
    if found.st_uid not in _trusted(above):
        raise _refusal(path, found, file, remedy)
    known = found.st_uid in (0, os.getuid())
    if not known and not any(path.is_relative_to(each) for each in _ROOTS_ALONE):
        raise ControlError(
            f"Nobody can tell in this container whether {path} is root's: {remedy}.",
            "unknown-owner",
        )
    if found.st_mode & _WRITABLE and not _only_by_us(found):
        raise ControlError(
            f"{path} may be written by others: chmod go-w it, or {remedy}.", "unsafe-directory"
        )


def check_inside(directory: Path, remedy: str) -> None:
    """Check whose a directory and what lies in it are; raises as `own_directory`.

    Where it lies may have been open to others once. One that is missing has nothing inside.
    """
    try:
        with os.scandir(directory) as entries:
            each = [(directory, directory.lstat())]
            each += [(Path(e.path), e.stat(follow_symlinks=False)) for e in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    for path, found in each:
        if found.st_uid not in (os.getuid(), 0):
            raise _refusal(path, found, directory, remedy)


def overflow_uid() -> int:
    """Number of all users who have none in this namespace."""
    return int(_OVERFLOW.read_text())


def _way(path: Path, *, make: bool) -> Iterator[tuple[Path, os.stat_result]]:
    """Go from ``/`` to a path, through what symbolic links stand for; yields them, too.

    A directory that is missing is made only when the one above it has been yielded, and so checked.
    """
    here, left, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield here, here.lstat()
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        there = here / name
        try:
            found = there.lstat()
        except FileNotFoundError:
            if not make:
                raise
            there.mkdir(mode=0o755 if left else 0o700, exist_ok=True)
            found = there.lstat()
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS_MAX:
                raise ControlError(f"{path} is behind too many links.", "unsafe-directory")
            target = Path(os.readlink(there))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = Path("/") if target.is_absolute() else here
        else:
            here = there
        yield there, found


def _check_above(above: list[tuple[Path, os.stat_result]], target: Path, remedy: str) -> None:
    trusted = _trusted(above)
    for path, found in above:
        known = found.st_uid in (0, os.getuid())
        if found.st_uid not in trusted or not (known or _only_owner_fills(path.parent)):
            raise _refusal(path, found, target, remedy)
        link, sticky = stat.S_ISLNK(found.st_mode), found.st_mode & stat.S_ISVTX
        if found.st_mode & _WRITABLE and not (link or sticky or _only_by_us(found)):
            raise ControlError(
                f"{path} (of {_user(found.st_uid)}) may be written by others, who could replace "
                f"{target}: chmod go-w it, or {remedy}.",
                "unsafe-directory",
            )


def _only_owner_fills(directory: Path) -> bool:
    """Whether nobody but its owner can make something in a directory."""
    return not directory.lstat().st_mode & _WRITABLE


def _trusted(above: list[tuple[Path, os.stat_result]]) -> set[int]:
    """Whose files are believed: this user's and root's, which may be nobody's; Note [Nobody]."""
    trusted = {0, os.getuid()}
    if above and above[0][1].st_uid == overflow_uid():
        trusted.add(above[0][1].st_uid)
    return trusted


def _refusal(path: Path, found: os.stat_result, target: Path, remedy: str) -> ControlError:
    what = "" if path == target else f", who could replace what is in {target}"
    return ControlError(
        f"{path} belongs to another user, {_user(found.st_uid)}{what}: {remedy}.",
        "unsafe-directory",
    )


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _only_by_us(found: os.stat_result) -> bool:
    """Whether nobody else can write what its group may: the group is its user's own.

    Where umask is 002, what users make is writable by groups in which nobody else is.
    """
    if found.st_mode & stat.S_IWOTH or os.getuid() == 0 or found.st_uid != os.getuid():
        return False
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    others = (each for each in pwd.getpwall() if each.pw_uid != me.pw_uid)
    return (
        found.st_gid == me.pw_gid
        and set(group.gr_mem) <= {me.pw_name}
        and not any(each.pw_gid == found.st_gid for each in others)
    )
