"""Restores files, and is killed before each step.

Run with ``python -m tests.doubles.storage.restoring DIR HOW``.

HOW is ``links`` or ``copies``: how files that are in the way are kept. Prints the number of steps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kernelproxy.kernel.files.changed_files import FileState, PathKind, PutBack, put_back

THEN, NOW = 1_000_000_000_000_000_000, 1_100_000_000_000_000_000
EVENTS = {
    "open", "os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.chmod",
    "os.utime",
}  # fmt: skip
KEPT = {b"changed now", b"same length now.", b"new now", b"deep now", b"in the way"}

CONTENT = {
    "same": b"the same",
    "changed": b"changed, then: " + b"x" * 20,
    "length": b"same length then",
    "removed": b"removed",
    "blocked": b"blocked",
    "a/b/deep": b"deep then",
}


def states(here: Path) -> list[FileState]:
    """Return the wanted states."""
    return [
        *(
            FileState(here / name, PathKind.FILE, 0o640, THEN, len(CONTENT[name]))
            for name in CONTENT
        ),
        *(FileState(here / name, PathKind.DIRECTORY, 0o750) for name in ("a", "a/b", "made")),
        *(
            FileState(here / name, PathKind.ABSENT)
            for name in ("new", "gone", "extra", "extra/new")
        ),
        FileState(here / "link", PathKind.SYMLINK, target="same"),
    ]


def make(here: Path) -> None:
    """Create the state before the restore."""
    shutil.rmtree(here.parent, ignore_errors=True)
    for name in ("a/b", "blocked", "extra"):
        (here / name).mkdir(parents=True)
    for name, content in {
        "same": CONTENT["same"],
        "changed": b"changed now",
        "length": b"same length now.",
        "new": b"new now",
        "extra/new": b"new now",
        "a/b/deep": b"deep now",
        "blocked/file": b"in the way",
        "untracked": b"untracked",
    }.items():
        (here / name).write_bytes(content)
        os.utime(here / name, ns=(NOW, NOW))
    (here / "link").symlink_to("changed")


def put(here: Path) -> PutBack:
    @contextlib.contextmanager
    def content(state: FileState) -> Iterator[list[bytes]]:
        whole = CONTENT[str(state.path.relative_to(here))]
        yield [whole[at : at + 5] for at in range(0, len(whole), 5)]

    return put_back(states(here), content, here.parent / "aside")


def killed_before(step: int, here: Path) -> bool:
    """Restore in a child that dies before that step; return False if it had fewer steps."""
    pid = os.fork()
    if pid == 0:
        left = step

        def count(event: str, arguments: object = None) -> None:
            nonlocal left
            if event in EVENTS:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*arguments: object, **more: object) -> object:
                count("open")
                return function(*arguments, **more)

            return wrapper

        sys.addaudithook(count)
        for name in ("write", "fsync", "fchmod"):
            setattr(os, name, counted(getattr(os, name)))
        put(here)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"it ended with {status}"
    return status != 0


def check_halfway(here: Path) -> None:
    """Check that every file is complete: the old or the new one."""
    for name, then in CONTENT.items():
        path = here / name
        if name == "removed":
            assert not path.exists() or path.read_bytes() == then
        elif name == "blocked":
            # A directory cannot be exchanged atomically for a file.
            assert not path.exists() or path.is_dir() or path.read_bytes() == then
        else:
            assert path.read_bytes() in (then, *KEPT), path
    assert os.readlink(here / "link") in ("changed", "same")


def check_done(here: Path) -> None:
    """Check that every state is as wanted, nothing was lost, and no temporary file is left."""
    for name, then in CONTENT.items():
        assert (here / name).read_bytes() == then, name
        # A file that is the same must not have been touched.
        expected = NOW if name == "same" else THEN
        assert (here / name).stat().st_mtime_ns == expected, name
    assert {str(path.relative_to(here)) for path in here.rglob("*")} == {
        *CONTENT, "a", "a/b", "made", "link", "untracked",
    }  # fmt: skip
    assert (here / "untracked").stat().st_mtime_ns == NOW
    kept = [path for path in here.parent.rglob("aside/**/*") if not path.is_dir()]
    assert {path.read_bytes() for path in kept if not path.is_symlink()} >= KEPT
    assert [os.readlink(path) for path in kept if path.is_symlink()] == ["changed"]


def main(directory: Path, how: str) -> None:
    here = directory / "all" / "here"
    if how == "copies":

        def link(*arguments: object, **more: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        os.link = link
    step = 0
    make(here)
    while killed_before(step, here):
        check_halfway(here)
        # The restore that continues is killed, too; the one after it completes.
        killed_before(step // 2, here)
        check_halfway(here)
        report = put(here)
        assert not report.problems, report.problems
        check_done(here)
        again = put(here)
        assert (again.restored, again.kept_aside, again.problems) == ([], {}, [])
        make(here)
        step += 1
    print(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
