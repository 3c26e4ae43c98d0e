"""The files that a checkpoint of a notebook includes, and those that it leaves out."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import FileError
from kernelproxy.common.units import bytes_text
from kernelproxy.kernel.files import changed_files
from kernelproxy.kernel.files.changed_files import (
    CollectedFiles,
    FileLimits,
    FileState,
    PathKind,
    collect,
    read_into,
)
from kernelproxy.kernel.files.file_state import Exclusion, default_exclusions

EVERYTHING = FileLimits(exclude=(), temporary=())
OLD = 1_000_000_000_123_456_789


def test_each_kind_is_described(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "file").chmod(0o640)
    os.utime(tmp_path / "file", ns=(OLD, OLD))
    (tmp_path / "directory").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("no where")
    paths = [tmp_path / name for name in ("link", "gone/too", "file", "directory", "file")]
    assert collect(paths, EVERYTHING) == CollectedFiles(
        [
            FileState(tmp_path / "directory", PathKind.DIRECTORY, 0o750),
            FileState(tmp_path / "file", PathKind.FILE, 0o640, OLD, 5),
            FileState(tmp_path / "gone" / "too", PathKind.ABSENT),
            FileState(tmp_path / "link", PathKind.SYMLINK, target="no where"),
        ]
    )


def test_files_that_cannot_be_collected_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to("real")
    paths = [tmp_path / name for name in ("pipe", "socket", "link/file")]
    collected = collect([*paths, Path("relative"), Path("/a/../b"), Path("/dev/null")], EVERYTHING)
    assert collected.states == []
    assert {str(each.path): each.why for each in collected.skipped} == {
        str(paths[0]): "is a named pipe",
        str(paths[1]): "is a socket",
        str(paths[2]): "lies behind a symbolic link now",
        "relative": "is not an absolute path",
        "/a/../b": "is not an absolute path",
        "/dev/null": "is a device",
    }


def test_files_of_others_are_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    (skipped,) = collect([tmp_path / "file"], EVERYTHING).skipped
    assert skipped.why == "belongs to another user"


def test_the_largest_files_are_left_out_with_their_sizes(tmp_path: Path) -> None:
    for name, size in {"a": 3000, "b": 10, "c": 2000, "d": 1500}.items():
        (tmp_path / name).write_bytes(bytes(size))
    limits = FileLimits((), file_bytes=2500, total_bytes=3000, count=3)
    collected = collect([tmp_path / name for name in "abcd"], limits)
    assert [state.path.name for state in collected.states] == ["b", "d"]
    assert collected.total_bytes == 1510
    assert [f"{each.path.name} {each.why}" for each in collected.skipped] == [
        "a has 2.9 KiB; files over 2.4 KiB are not saved",
        "c has 2.0 KiB; with it, files would take more than 2.9 KiB",
    ]
    collected = collect([tmp_path / name for name in "abcd"], FileLimits((), count=2))
    assert [str(each) for each in collected.skipped] == [
        f"{tmp_path}/c and 1 more are not saved: a checkpoint takes 2 paths"
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1023 << 10, "1023.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_temporary_files_that_are_gone_are_nothing(tmp_path: Path) -> None:
    limits = FileLimits((), temporary=(str(tmp_path),))
    (tmp_path / "here").touch()
    collected = collect([tmp_path / "here", tmp_path / "gone"], limits)
    assert [state.path.name for state in collected.states] == ["here"]
    assert (collected.excluded, collected.skipped) == (1, [])


@pytest.mark.parametrize(
    ("path", "excluded"),
    [
        ("/home/ada/work/__pycache__/a.cpython-311.pyc", True),
        ("/home/ada/work/module.pyc", True),
        ("/home/ada/repo/.git/index", True),
        ("/home/ada/repo/.git", True),
        ("/home/ada/repo/.gitignore", False),
        ("/home/ada/.cache/huggingface/model.bin", True),
        ("/home/ada/.ipython/profile_default/history.sqlite", True),
        ("/srv/profile_x/history.sqlite-journal", True),
        ("/home/ada/env/lib/python3.12/site-packages/x.py", True),
        ("/usr/local/bin/tool", True),
        ("/home/ada/.sing-0123.part", True),
        ("/home/ada/usr/file", False),
        ("/home/ada/data.csv", False),
        ("/tmp/data.csv", False),
        ("/runs/jupyter/kernel-1.json", True),
        ("/runs/jupyterlab/x", False),
    ],
)
def test_defaults_leave_out_caches_and_systems(path: str, excluded: bool) -> None:
    environ = {"JUPYTER_RUNTIME_DIR": "/runs/jupyter", "XDG_CACHE_HOME": "/"}
    assert (Path(path) in Exclusion(default_exclusions(environ))) == excluded


def test_patterns_of_users_exclude_paths() -> None:
    exclusion = Exclusion(["~/scratch/", "*.tmp", "/data/[ab]", ""])
    assert Path.home() / "scratch" / "x" in exclusion
    assert Path("/x/y.tmp") in exclusion
    assert Path("/data/a/deep/file") in exclusion
    assert Path("/data/c") not in exclusion
    assert Path("/x/y.tmpl") not in exclusion
    assert Path("/") not in Exclusion([])


# ---------------------------------------------------------------- reading


def test_content_is_read_as_it_is(tmp_path: Path) -> None:
    file, content = tmp_path / "file", random.Random(1).randbytes(3 << 20)
    file.write_bytes(content)
    (state,) = collect([file], EVERYTHING).states
    with scratch(tmp_path) as fd:
        assert read_into(state, fd, 7) == state
        assert os.pread(fd, len(content) + 8, 0) == bytes(7) + content
        file.write_bytes(b"later")
        assert read_into(state, fd) == collect([file], EVERYTHING).states[0]
        with pytest.raises(FileError, match="has grown to 5 B"):
            read_into(state, fd, bytes_max=4)


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[int]:
    fd = os.open(directory / "scratch", os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("times", [1, 2, 100])
def test_a_file_that_changes_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0")
    (state,) = collect([file], EVERYTHING).states
    copy, left = changed_files._copy, [times]

    def disturbed(*arguments: int) -> int:
        count = copy(*arguments)
        if left[0]:
            left[0] -= 1
            with open(file, "ab") as writing:
                writing.write(b"1")
        return count

    monkeypatch.setattr(changed_files, "_copy", disturbed)
    with scratch(tmp_path) as fd:
        if times == 100:
            with pytest.raises(FileError, match="changed each time"):
                read_into(state, fd)
        else:
            assert read_into(state, fd).size == times + 1
            assert os.pread(fd, 10, 0) == b"0" + b"1" * times


def test_a_removed_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (state,) = collect([file], EVERYTHING).states
    file.unlink()
    for make in (lambda: None, lambda: os.mkfifo(file), lambda: file.symlink_to("/etc/passwd")):
        make()
        with scratch(tmp_path) as fd, pytest.raises(FileError):
            read_into(state, fd)
        file.unlink(missing_ok=True)
