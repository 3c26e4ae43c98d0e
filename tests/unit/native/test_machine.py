"""Libraries that root has built for all users of a machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kernelproxy.common.errors import NativeError
from kernelproxy.native import build, compiler, libraries, machine_libraries

KEY = "torch2.13.0-cpython-311-x86_64-0123456789abcdef"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's directory."""
    monkeypatch.setenv(machine_libraries.VARIABLE, str(tmp_path / "machine"))
    return tmp_path / "machine"


def compile_into(cache: Path) -> Path:
    place = cache / KEY
    place.mkdir()
    for name in ("libsing_client.so", "libsing_worker.so"):
        (place / name).write_text(name)
    return place / "libsing_client.so"


def found() -> build.NativeParts | None:
    return machine_libraries.inside(KEY, build.NativeParts.inside)


def test_built_libraries_are_found_and_readable_by_all(shared: Path) -> None:
    assert found() is None
    mask = os.umask(0o077)
    try:
        assert machine_libraries.build([compile_into]) == [shared / KEY]
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(mask)
    assert found() == build.NativeParts.inside(shared / KEY)
    for each in (shared, shared / KEY, *(shared / KEY).iterdir()):
        mode = each.stat().st_mode
        assert mode & stat.S_IROTH
        assert not mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_machine_libraries_precede_the_users_cache(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_libraries.build([compile_into])
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    parts = libraries.find_or_build(
        KEY,
        None,
        build.NativeParts.inside,
        lambda cache, tell: pytest.fail("it compiles"),
        "a test",
    )
    assert parts.client.parent == shared / KEY


def test_changed_libraries_are_refused(shared: Path) -> None:
    machine_libraries.build([compile_into])
    (shared / KEY / "libsing_worker.so").write_text("another")
    with pytest.raises(NativeError, match="is not what was built: ask root for"):
        found()


@pytest.mark.parametrize("what", ["libsing_client.so", machine_libraries.DIGESTS, "."])
def test_libraries_writable_by_others_are_not_loaded(shared: Path, what: str) -> None:
    machine_libraries.build([compile_into])
    (shared / KEY / what).chmod(0o777)
    with pytest.raises(NativeError, match="may be written by others"):
        found()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_libraries_of_another_user_are_not_loaded(shared: Path) -> None:
    machine_libraries.build([compile_into])
    os.chown(shared / KEY / "libsing_client.so", 4711, 4711)
    with pytest.raises(NativeError, match="belongs to another user"):
        found()
    os.chown(shared, 4711, 4711)
    with pytest.raises(NativeError, match="belongs to another user"):
        machine_libraries.build([compile_into])


@pytest.mark.parametrize("text", ["", "[]", '{"libsing_client.so": 1, "gone": 2}'])
def test_damaged_digests_are_refused(shared: Path, text: str) -> None:
    machine_libraries.build([compile_into])
    (shared / KEY / machine_libraries.DIGESTS).write_text(text)
    with pytest.raises(NativeError, match="ask root for"):
        found()


@pytest.mark.parametrize(("free", "most"), [(100 << 30, 3), (2 << 30, 2), (100 << 20, 1)])
def test_there_are_no_more_compilers_than_memory_for_them(
    free: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {free >> 10} kB\n")
    monkeypatch.setattr(compiler, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert compiler.parallel_compilers() == most
