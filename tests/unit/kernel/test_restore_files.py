"""Files of checkpoints are restored, and no others are changed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import StoreError
from kernelproxy.kernel.files import changed_files, restore_files
from kernelproxy.kernel.files.changed_files import (
    FileLimits,
    FileState,
    PathKind,
    Skipped,
    collect,
    put_back,
)
from kernelproxy.kernel.files.file_state import Exclusion, default_exclusions

EVERYTHING = FileLimits(exclude=(), temporary=())
OLD = 1_000_000_000_123_456_789


class Saved:
    """The states of paths and the content of their files."""

    def __init__(self, *paths: Path) -> None:
        self.states = collect(paths, EVERYTHING).states
        self.bytes = {s.path: s.path.read_bytes() for s in self.states if s.kind == PathKind.FILE}

    @contextlib.contextmanager
    def content(self, state: FileState) -> Iterator[list[bytes]]:
        whole = self.bytes[state.path]
        yield [whole[at : at + 3] for at in range(0, len(whole), 3)]

    def put_back(self, aside: Path) -> changed_files.PutBack:
        return put_back(self.states, self.content, aside)


def tree(directory: Path) -> dict[str, object]:
    """Return everything in a directory, for comparison."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            content: object = os.readlink(path)
        elif path.is_file():
            content = (path.read_bytes(), status.st_mtime_ns)
        else:
            content = stat.S_IFMT(status.st_mode)
        mode = 0 if path.is_symlink() else stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(directory))] = (content, mode)
    return found


def test_files_are_put_back_and_what_was_there_is_kept(tmp_path: Path) -> None:
    here, aside = tmp_path / "here", tmp_path / "aside"
    (here / "sub").mkdir(parents=True)
    for name in ("same", "changed", "removed", "sub/replaced"):
        (here / name).write_text(f"{name} then")
        os.utime(here / name, ns=(OLD, OLD))
    (here / "link").symlink_to("same")
    (here / "untracked").write_text("untracked")
    names = ("same", "changed", "removed", "sub/replaced", "link", "new", "sub")
    saved, before = Saved(*(here / name for name in names)), tree(here)

    os.utime(here / "same", (5, 5))
    (here / "changed").write_text("changed now")
    (here / "removed").unlink()
    (here / "sub" / "replaced").unlink()
    (here / "sub" / "replaced").mkdir()
    (here / "sub" / "replaced" / "file").write_text("in the way")
    (here / "link").unlink()
    (here / "link").symlink_to("changed")
    (here / "new").write_text("new now")
    report = saved.put_back(aside)

    assert report.problems == []
    assert {path.name for path in report.unchanged} == {"same", "sub"}
    assert {path.name for path in report.restored} == {
        "changed", "removed", "replaced", "link", "new",
    }  # fmt: skip
    assert (here / "same").stat().st_mtime == 5
    os.utime(here / "same", ns=(OLD, OLD))
    assert tree(here) == before
    kept = {path.name: place for path, place in report.kept_aside.items()}
    assert kept["changed"] == aside / (here / "changed").relative_to("/")
    assert kept["changed"].read_text() == "changed now"
    assert kept["new"].read_text() == "new now"
    assert os.readlink(kept["link"]) == "changed"
    assert (kept["replaced"] / "file").read_text() == "in the way"
    assert kept.keys() == {"changed", "new", "link", "replaced"}

    again = saved.put_back(aside)
    assert (again.restored, again.kept_aside, again.problems) == ([], {}, [])
    assert tree(here) == before


def test_several_restores_keep_everything_apart(tmp_path: Path) -> None:
    file = tmp_path / "here"
    file.write_text("then")
    saved = Saved(file)
    for text in ("one", "two", "one", "three"):
        file.write_text(text)
        saved.put_back(tmp_path / "aside")
        assert file.read_text() == "then"
    kept = sorted((tmp_path / "aside" / tmp_path.relative_to("/")).iterdir())
    assert [(path.name, path.read_text()) for path in kept] == [
        ("here", "one"), ("here~1", "two"), ("here~2", "three"),
    ]  # fmt: skip


def test_missing_files_are_created_with_directories_and_modes(tmp_path: Path) -> None:
    closed = tmp_path / "a" / "closed"
    closed.mkdir(parents=True)
    (closed / "file").write_text("text")
    (closed / "file").chmod(0o400)
    closed.chmod(0o500)
    saved = Saved(closed, closed / "file")
    for path in (closed, closed / "file"):
        path.chmod(0o700)
    (closed / "file").unlink()
    closed.rmdir()
    closed.parent.rmdir()
    assert saved.put_back(tmp_path / "aside").problems == []
    assert (closed / "file").read_text() == "text"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (closed, closed / "file")] == [
        0o500, 0o400,
    ]  # fmt: skip
    closed.chmod(0o700)


def test_a_mode_alone_is_put_back_without_writing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    file.chmod(0o600)
    saved, inode = Saved(file), file.stat().st_ino
    file.chmod(0o644)
    assert saved.put_back(tmp_path / "aside").restored == [file]
    assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_ino) == (0o600, inode)


def test_directories_that_were_absent_are_removed_if_empty(tmp_path: Path) -> None:
    new = tmp_path / "new"
    saved = Saved(new, new / "sub", new / "sub" / "file")
    (new / "sub").mkdir(parents=True)
    (new / "sub" / "file").write_text("new")
    assert saved.put_back(tmp_path / "aside").problems == []
    assert not new.exists()
    (new / "sub").mkdir(parents=True)
    (new / "foreign").write_text("somebody else's")
    report = saved.put_back(tmp_path / "aside")
    assert [str(each) for each in report.problems] == [
        f"{new} is a directory with files now; it stays as it is"
    ]
    assert [path.name for path in new.iterdir()] == ["foreign"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "sub").mkdir(parents=True)
    elsewhere.mkdir()
    (here / "file").write_text("then")
    (here / "sub" / "file").write_text("then")
    saved = Saved(here / "file", here / "sub" / "file", here / "sub" / "gone", here / "sub")
    (elsewhere / "file").write_text("now")
    (here / "file").unlink()
    (here / "file").symlink_to(elsewhere / "file")
    (here / "sub").rename(tmp_path / "moved")
    (here / "sub").symlink_to(elsewhere)
    without = [state for state in saved.states if state.kind != PathKind.DIRECTORY]
    report = put_back(without, saved.content, tmp_path / "aside")
    assert (here / "file").read_text() == "then"
    assert not (here / "file").is_symlink()
    assert {str(each) for each in report.problems} == {
        f"{here}/sub/file lies behind a symbolic link now, {here}/sub"
    }
    assert (elsewhere / "file").read_text() == "now"
    # If the checkpoint includes the directory, it is restored, and the link is kept aside.
    assert saved.put_back(tmp_path / "aside").problems == []
    assert (here / "sub" / "file").read_text() == "then"
    assert {path.name for path in elsewhere.iterdir()} == {"file"}


def test_files_excluded_from_checkpoints_are_left_in_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("then")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("then")
    saved = Saved(tmp_path / "a", tmp_path / "b", tmp_path / "sub" / "file")
    for name in "ab":
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "sub" / "file").unlink()
    (tmp_path / "sub").rmdir()
    (tmp_path / "sub").write_text("a file")
    report = saved.put_back(tmp_path / "aside")
    assert [str(each) for each in report.problems] == [
        f"{tmp_path}/b is a named pipe now; it stays as it is",
        f"{tmp_path}/a is a named pipe now; it stays as it is",
        f"{tmp_path}/sub/file has no directory: {tmp_path}/sub is a file now",
    ]
    assert (tmp_path / "sub").read_text() == "a file"


def test_files_of_others_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("then")
    saved = Saved(tmp_path / "file", tmp_path / "gone")
    for name in ("file", "gone"):
        (tmp_path / name).write_text("now")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    report = saved.put_back(tmp_path / "aside")
    assert [each.why for each in report.problems] == 2 * [
        "belongs to another user now; it stays as it is"
    ]
    assert (tmp_path / "file").read_text() == (tmp_path / "gone").read_text() == "now"


FILE = FileState(Path("/x"), PathKind.FILE)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (FileState(Path("relative"), PathKind.FILE), "is not an absolute path to a file"),
        (
            FileState(Path("/home/../etc/passwd"), PathKind.FILE),
            "is not an absolute path to a file",
        ),
        (FileState(Path("//host/share"), PathKind.FILE), "is not an absolute path to a file"),
        (FileState(Path("/"), PathKind.DIRECTORY), "is not an absolute path to a file"),
        (FileState(Path("/home/a\0b"), PathKind.FILE), "is not an absolute path to a file"),
        (FileState(Path("/etc/passwd"), PathKind.FILE), "belongs to the system"),
        (FileState(Path("/usr/bin"), PathKind.ABSENT), "belongs to the system"),
        (FileState(Path("/proc/self/mem"), PathKind.FILE), "belongs to the system"),
        (FileState(Path("/x"), PathKind.SYMLINK), "is a link to nowhere"),
        (FileState(Path("/x"), PathKind.SYMLINK, target="a\0b"), "is a link to nowhere"),
        (FileState(Path("/x"), PathKind.FILE, size=-1), "has an impossible size or time"),
        (FileState(Path("/x"), PathKind.FILE, mtime_ns=1 << 80), "has an impossible size or time"),
    ],
)
def test_tampered_states_are_refused(tmp_path: Path, state: FileState, why: str) -> None:
    report = put_back([state], no_content, tmp_path / "aside")
    assert report.problems == [Skipped(state.path, why)]
    assert not (tmp_path / "aside").exists()


@contextlib.contextmanager
def no_content(state: FileState) -> Iterator[list[bytes]]:
    raise AssertionError("must not be asked for")
    yield []


def test_a_state_grants_no_special_rights(tmp_path: Path) -> None:
    state = FileState(tmp_path / "file", PathKind.FILE, 0o6755, OLD, 4)
    put_back([state], lambda state: contextlib.nullcontext([b"text"]), tmp_path / "aside")
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([b"tex"], "has 3 bytes in the checkpoint instead of 4"),
        ([b"text", b"s"], "has 5 bytes in the checkpoint instead of 4"),
        (
            StoreError("A chunk is missing."),
            "cannot be read from the checkpoint: A chunk is missing.",
        ),
        (OSError(5, "Input/output error"), "cannot be restored: Input/output error"),
    ],
)
def test_damaged_content_changes_nothing_and_stops_nothing(
    tmp_path: Path, content: list[bytes] | Exception, why: str
) -> None:
    (tmp_path / "file").write_text("text now")

    @contextlib.contextmanager
    def pieces(state: FileState) -> Iterator[list[bytes]]:
        if state.path.name == "other":
            yield [b"good"]
        elif isinstance(content, Exception):
            raise content
        else:
            yield content

    states = [
        FileState(tmp_path / name, PathKind.FILE, 0o600, OLD, 4) for name in ("file", "other")
    ]
    report = put_back(states, pieces, tmp_path / "aside")
    assert report.problems == [Skipped(tmp_path / "file", why)]
    assert report.restored == [tmp_path / "other"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {
        "file": "text now", "other": "good",
    }  # fmt: skip


def test_our_bugs_are_not_hidden(tmp_path: Path) -> None:
    def broken(state: FileState) -> contextlib.AbstractContextManager[list[bytes]]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        put_back(
            [FileState(tmp_path / "file", PathKind.FILE, 0o600, OLD, 4)], broken, tmp_path / "x"
        )
    assert list(tmp_path.iterdir()) == []


def test_files_on_another_file_system_are_copied_or_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, directory = tmp_path / "file", tmp_path / "directory"
    file.write_text("then")
    directory.write_text("then")
    saved = Saved(file, directory)
    file.write_text("now")
    os.utime(file, ns=(OLD, OLD))
    directory.unlink()
    directory.mkdir()
    (directory / "inside").touch()
    rename = os.rename

    def rename_here(source: str, target: str, **descriptors: int) -> None:
        if "src_dir_fd" in descriptors and "dst_dir_fd" not in descriptors:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target, **descriptors)

    def link(source: str, target: str, **more: int) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", rename_here)
    monkeypatch.setattr(os, "link", link)
    report = saved.put_back(tmp_path / "aside")
    assert report.problems == []
    assert file.read_text() == directory.read_text() == "then"
    kept = report.kept_aside[file]
    assert (kept.read_text(), kept.stat().st_mtime_ns) == ("now", OLD)
    assert report.kept_aside[directory] == tmp_path / "directory.aside"
    assert (tmp_path / "directory.aside" / "inside").exists()


# ---------------------------------------------------------------- random trees


def random_tree(dice: random.Random, directory: Path) -> None:
    """Make, change and remove things below a directory."""
    for _ in range(40):
        path = directory.joinpath(*(dice.choice("abc") for _ in range(dice.randint(1, 3))))
        with contextlib.suppress(OSError):
            RANDOM_STEPS[dice.randrange(len(RANDOM_STEPS))](dice, path)


def remove(dice: random.Random, path: Path) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


RANDOM_STEPS: list[Callable[[random.Random, Path], object]] = [
    lambda dice, path: path.write_bytes(dice.randbytes(dice.randrange(9))),
    lambda dice, path: path.write_bytes(dice.randbytes(dice.randrange(9))),
    lambda dice, path: path.mkdir(parents=True),
    lambda dice, path: path.chmod(dice.choice([0o700, 0o750])),
    lambda dice, path: path.chmod(0o640 if path.is_file() else 0o755),
    lambda dice, path: path.symlink_to(dice.choice("abc")),
    lambda dice, path: path.rename(path.with_name(dice.choice("abc"))),
    remove,
    remove,
]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happened_since_everything_known_comes_back(tmp_path: Path, seed: int) -> None:
    dice, here = random.Random(seed), tmp_path / "here"
    here.mkdir()
    random_tree(dice, here)
    every = [here.joinpath(*name) for name in names()]
    saved, before = Saved(*every), tree(here)
    assert saved.states
    random_tree(dice, here)
    contents = file_contents(here)
    report = saved.put_back(tmp_path / "aside")
    assert not report.problems
    now = tree(here)
    assert {name: timeless(found) for name, found in now.items()} == {
        name: timeless(found) for name, found in before.items()
    }
    assert contents <= file_contents(here) | file_contents(tmp_path / "aside")
    again = saved.put_back(tmp_path / "aside")
    assert (again.restored, again.kept_aside, again.problems) == ([], {}, [])
    assert tree(here) == now


def names() -> Iterator[tuple[str, ...]]:
    for a in "abc":
        yield (a,)
        for b in "abc":
            yield (a, b)
            yield from ((a, b, c) for c in "abc")


def timeless(found: Any) -> object:
    """Return states without the modification time, which a file that is the same keeps."""
    content, mode = found
    return (content[0] if isinstance(content, tuple) else content, mode)


def file_contents(directory: Path) -> set[bytes]:
    every = directory.rglob("*")
    return {each.read_bytes() for each in every if each.is_file() and not each.is_symlink()}


def test_part_names_are_excluded_by_default() -> None:
    assert Path("/home") / restore_files._part("x") in Exclusion(default_exclusions({}))
