"""Ownership checks of trusted files and directories: only this user and root may write them.

Libraries, checkpoints, policies and sockets are trusted because of their location. So no directory
and no symbolic link on the path from ``/`` to them may belong to another user, and none of the
directories may be writable by others. Standard library only.

Note [Overflow user]: in a user namespace without a mapping for the machine's root, root's files
appear as the overflow user's, like those of all other unmapped users. There, such a file is trusted
only in places where only root creates files, and such a directory only if its parent is not
writable by others.
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
#: Places where only root creates files; see Note [Overflow user].
_ROOTS_ALONE = tuple(map(Path, ("/etc", "/usr", "/var/cache/jupyter-sing", "/run/jupyter-sing")))


def own_directory(directory: Path, remedy: str, *, shared: bool = False) -> Path:
    """Create a directory for this user only, or check that no other user could write to it.

    Parameters
    ----------
    directory : Path
        Absolute. Missing parents are created, too.
    remedy : str
        User-facing advice in case it is refused: ``set NAME``.
    shared : bool
        Whether root may own it, too.

    Raises
    ------
    ControlError
        If it or one of its parents belongs to another user, or is writable by others (reason
        ``unsafe-directory``).
    OSError
        If it cannot be created.
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
    """Check that no other user could have written a file.

    Raises
    ------
    ControlError
        As `own_directory`; or if it is unknown whether root or another user owns the file (reason
        ``unknown-owner``, see Note [Overflow user]).
    OSError
        If there is no such file.
    """
    *above, (path, found) = _way(file, make=False)
    _check_above(above, file, remedy)
    if found.st_uid not in _trusted(above):
        raise _refusal(path, found, file, remedy)
    known = found.st_uid in (0, os.getuid())
    if not known and not any(path.is_relative_to(each) for each in _ROOTS_ALONE):
        raise ControlError(
            f"This container cannot show whether {path} belongs to root: {remedy}.",
            "unknown-owner",
        )
    if found.st_mode & _WRITABLE and not _only_by_us(found):
        raise ControlError(
            f"{path} may be written by others: chmod go-w it, or {remedy}.", "unsafe-directory"
        )


def check_inside(directory: Path, remedy: str) -> None:
    """Check the owners of a directory and of its entries; raises as `own_directory`.

    Its parent may have been writable by others earlier. A missing directory is accepted.
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
    """Return the uid that stands for all users who are not mapped into this user namespace."""
    return int(_OVERFLOW.read_text())


def _way(path: Path, *, make: bool) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each directory and symbolic link from ``/`` to a path; links are followed.

    A missing directory is created only after its parent was yielded, and so checked.
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
    """True if only its owner can create files in a directory."""
    return not directory.lstat().st_mode & _WRITABLE


def _trusted(above: list[tuple[Path, os.stat_result]]) -> set[int]:
    """Return the trusted owners of files: this user and root; see Note [Overflow user]."""
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
    """True if a file's group is its owner's private group, so that no other user can write it.

    With umask 002, users' files are writable by their private groups.
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
