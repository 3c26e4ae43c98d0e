"""Nothing is loaded from a place to which another user could write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_sing.controller import policy_file
from kernelproxy.common import ownership, paths
from kernelproxy.common.errors import ControlError, NativeError
from kernelproxy.native import libraries, tools

BOB = 12345
ROOT_ALONE = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def load_library(base: Path) -> object:
    return libraries.cache_directory()


def load_checkpoints(base: Path) -> object:
    return paths.data_dir()


def load_socket(base: Path) -> object:
    return paths.runtime_dir()


def load_compiled_code(base: Path) -> object:
    return paths.cache_dir("inductor")


LOADERS: dict[Callable[[Path], object], tuple[str, str]] = {
    load_library: ("jupyter_sing/native", "XDG_CACHE_HOME"),
    load_compiled_code: ("jupyter_sing/inductor", "XDG_CACHE_HOME"),
    load_checkpoints: ("", "JUPYTER_SING_DATA_DIR"),
    load_socket: ("", "JUPYTER_SING_RUNTIME_DIR"),
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that every user can write to, like ``/tmp``, which contains all of our files."""
    base = tmp_path / "common"
    base.mkdir()
    base.chmod(0o1777)
    for name in ("XDG_CACHE_HOME", "JUPYTER_SING_DATA_DIR", "JUPYTER_SING_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(base / "place"))
    return base


@pytest.mark.parametrize("load", LOADERS)
def test_a_missing_directory_is_created_and_found_again(
    base: Path, load: Callable[[Path], object]
) -> None:
    directory = base / "place" / LOADERS[load][0]
    assert load(base) == directory == load(base)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not (base / "place").stat().st_mode & 0o022


@ROOT_ALONE
@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("trick", ["above", "itself", "link", "open", "open above"])
def test_a_directory_made_by_another_user_is_refused(
    base: Path, load: Callable[[Path], object], trick: str
) -> None:
    place, (below, remedy) = base / "place", LOADERS[load]
    target = place / below
    if trick == "above":
        place.mkdir()
        os.chown(place, BOB, BOB)
    elif trick == "itself":
        target.mkdir(parents=True)
        os.chown(target, BOB, BOB)
    elif trick == "link":
        (base / "mine").mkdir(mode=0o700)
        place.symlink_to(base / "mine")
        os.chown(place, BOB, BOB, follow_symlinks=False)
    elif trick == "open":
        target.mkdir(parents=True)
        target.chmod(0o777)
    else:
        target.mkdir(mode=0o700, parents=True)
        base.chmod(0o777)
    with pytest.raises((ControlError, NativeError)) as error:
        load(base)
    said = str(error.value)
    assert f"set {remedy} to a directory of your own" in said
    assert "\n" not in said
    if trick.startswith("open"):
        assert "may be written by others" in said
    else:
        assert "belongs to another user, uid 12345" in said


@ROOT_ALONE
def test_links_and_sticky_directories_of_ours_and_of_roots_are_followed(base: Path) -> None:
    (base / "mine").mkdir(mode=0o700)
    (base / "place").symlink_to("../common/mine")
    assert paths.data_dir() == base / "place"
    (base / "mine").rmdir()
    (base / "place").unlink()
    (base / "place").symlink_to("place")
    with pytest.raises(ControlError, match="too many links"):
        paths.data_dir()


@ROOT_ALONE
def test_files_in_a_once_writable_directory_are_not_trusted(base: Path) -> None:
    checkpoints = paths.data_dir() / "states"
    checkpoints.mkdir()
    os.chown(checkpoints, BOB, BOB)
    with pytest.raises(ControlError, match="states belongs to another user"):
        paths.data_dir()
    checkpoints.rmdir()
    cache = libraries.cache_directory()

    def build(cache: Path, tell: object) -> None:
        raise AssertionError("it is there")

    def inside(found: Path) -> Path | None:
        return found if found.is_dir() else None

    for whose in ("key", "key/library.so"):
        (cache / "key").mkdir(exist_ok=True)
        (cache / "key" / "library.so").touch()
        os.chown(cache / whose, BOB, BOB)
        with pytest.raises(NativeError, match="belongs to another user"):
            libraries.find_or_build("key", cache, inside, build, "a test")
        os.chown(cache / whose, 0, 0)
    assert libraries.find_or_build("key", cache, inside, build, "a test") == cache / "key"


@ROOT_ALONE
def test_the_file_tracker_of_another_user_is_not_preloaded(base: Path) -> None:
    (base / "place" / "jupyter_sing").mkdir(parents=True)
    os.chown(base / "place" / "jupyter_sing", BOB, BOB)
    with pytest.raises(NativeError, match="belongs to another user"):
        tools.file_tracker(lambda text: None)


@ROOT_ALONE
@pytest.mark.parametrize("trick", ["owner", "mode", "directory"])
def test_a_policy_that_others_may_write_is_not_applied(base: Path, trick: str) -> None:
    file = base / "policies" / "policy.yaml"
    file.parent.mkdir()
    file.write_text("")
    ownership.check_file(file, "copy it")
    if trick == "owner":
        os.chown(file, BOB, BOB)
    elif trick == "mode":
        file.chmod(0o666)
    else:
        os.chown(file.parent, BOB, BOB)
    with pytest.raises(ControlError, match="copy it"):
        ownership.check_file(file, "copy it")
    with pytest.raises(ControlError):
        policy_file._read(file)


@ROOT_ALONE
def test_only_an_own_directory_is_trusted_if_root_is_not_mapped(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a rootless container: root's files there look like those of other users."""
    overflow = base / "overflowuid"
    overflow.write_text(str(os.lstat("/").st_uid))
    monkeypatch.setattr(ownership, "_OVERFLOW", overflow)
    monkeypatch.setattr(os, "getuid", lambda: BOB)
    with pytest.raises(ControlError, match="belongs to another user, root"):
        paths.data_dir()
    os.chown(base / "place", BOB, BOB)
    assert paths.data_dir() == base / "place"


@ROOT_ALONE
def test_an_unmapped_owner_does_not_pass_as_root(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of ``/`` has the same uid there as all other unmapped users."""
    (tmp := base / "nobodys").mkdir()
    file = base.parent / "library.so"
    for each in (file, tmp / "library.so"):
        each.touch()
    lstat, nobody = Path.lstat, ownership.overflow_uid()

    def mapped(path: Path) -> os.stat_result:
        """Leave root's uid unmapped, and only `base` writable by all."""
        mode, *found = lstat(path)
        found[3] = found[3] or nobody
        return os.stat_result((mode if path == base else mode & ~0o022, *found))

    monkeypatch.setattr(Path, "lstat", mapped)
    monkeypatch.setattr(os, "getuid", lambda: BOB)
    with pytest.raises(ControlError, match="cannot show whether") as caught:
        ownership.check_file(file, "build it")
    assert caught.value.reason == "unknown-owner"
    with pytest.raises(ControlError, match="belongs to another user"):
        ownership.check_file(tmp / "library.so", "build it")
    monkeypatch.setattr(ownership, "_ROOTS_ALONE", (file.parent,))
    ownership.check_file(file, "build it")
    os.chown(file, BOB, BOB)
    monkeypatch.setattr(ownership, "_ROOTS_ALONE", ())
    ownership.check_file(file, "build it")
