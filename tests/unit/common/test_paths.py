"""Locations of our files, and protection against other users who could write there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.common import ownership, paths
from kernelproxy.common.errors import ControlError


def test_the_runtime_directory_is_made_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(tmp_path / "a" / "b"))
    directory = paths.runtime_dir()
    assert directory == tmp_path / "a" / "b"
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ControlError, match="chmod 700"):
        paths.runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, 12345, 12345)
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ControlError, match="another user"):
        paths.runtime_dir()


@pytest.mark.parametrize("variables", [
    {"JUPYTER_RUNTIME_DIR": "/x/run"},
    {"JUPYTER_DATA_DIR": "/x/data"},
    {"XDG_DATA_HOME": "/x/xdg"},
    {},
])  # fmt: skip
def test_jupyters_rule_holds_without_jupyter(variables: dict[str, str]) -> None:
    program = (
        "import sys\n"
        "if {blocked}: sys.modules['jupyter_core'] = sys.modules['jupyter_core.paths'] = None\n"
        "from kernelproxy.common import paths\n"
        "print(paths.jupyter_runtime_dir(), paths.jupyter_data_dir())"
    )
    environment = {"HOME": "/x/home", "PYTHONPATH": os.getcwd(), **variables}
    said = {
        subprocess.run(
            [sys.executable, "-c", program.format(blocked=blocked)],
            env=environment,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for blocked in (True, False)
    }
    assert len(said) == 1


def test_a_socket_of_any_depth_can_be_bound(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["deeper"] * 30)
    deep.mkdir(parents=True)
    assert len(str(deep)) > 108
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with paths.short_path(deep / "agent.sock") as name:
            listener.bind(name)
        listener.listen(1)
        with paths.short_path(deep / "agent.sock") as name:
            caller.connect(name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_bundle_exposes_nothing_but_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(tmp_path / "run"))
    bundle = paths.bundle_dir()
    assert {each.name for each in bundle.iterdir()} == {
        "kernelproxy",
        "jupyter_sing",
        "beside.ours",
    }
    assert paths.bundle_dir() == bundle
    link = bundle / "kernelproxy"
    link.unlink()
    link.symlink_to("/nonexistent")  # as after a move of the installation
    paths.bundle_dir()
    assert link.resolve() == Path(paths.__file__).resolve().parents[1]
    program = "import kernelproxy, sys; print(kernelproxy.__file__); import pytest"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(bundle)},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.stdout.strip() == str(link / "__init__.py")
    assert "No module named 'pytest'" in done.stderr


class TestTheSystemsSocket:
    @pytest.fixture
    def system(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A directory as root creates it, with a socket; the user's own is in another place."""
        directory = tmp_path / "system"
        directory.mkdir()
        directory.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener, paths.short_path(directory / "x") as name:
            listener.bind(name.replace("/x", "/agent.sock"))
        for name in ("SING_SOCKET", "JUPYTER_SING_RUNTIME_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("JUPYTER_SING_SYSTEM_DIR", str(directory))
        monkeypatch.setattr(paths, "jupyter_runtime_dir", lambda: tmp_path / "own")
        return directory

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can make one")
    def test_the_system_directory_is_used_unless_another_is_named(
        self, system: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert paths.socket_path() == system / "agent.sock"
        assert paths.is_shared(paths.socket_path())
        monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(tmp_path / "named"))
        assert paths.socket_path() == tmp_path / "named" / "agent.sock"
        monkeypatch.setenv("SING_SOCKET", "/of/the/kernel")
        assert paths.socket_path() == Path("/of/the/kernel")
        for name in ("SING_SOCKET", "JUPYTER_SING_RUNTIME_DIR"):
            monkeypatch.delenv(name)
        (system / "agent.sock").unlink()
        assert paths.socket_path() == tmp_path / "own" / "sing" / "agent.sock"
        assert not paths.is_shared(paths.socket_path())
        monkeypatch.setenv("JUPYTER_SING_SYSTEM_DIR", str(tmp_path / "nothing"))
        assert paths.system_socket() is None

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
    @pytest.mark.parametrize("whose", ["directory", "socket", "link", "writable", "file"])
    def test_a_socket_another_user_could_have_made_is_refused(
        self, system: Path, tmp_path: Path, whose: str
    ) -> None:
        found = system / "agent.sock"
        if whose == "directory":
            os.chown(system, 12345, 12345)
        elif whose == "socket":
            os.chown(found, 12345, 12345)
        elif whose == "writable":
            system.chmod(0o777)
        elif whose == "link":
            found.rename(tmp_path / "elsewhere")
            found.symlink_to(tmp_path / "elsewhere")
        else:
            found.unlink()
            found.touch()
        with pytest.raises(ControlError):
            paths.socket_path()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
    def test_in_a_rootless_container_the_error_suggests_what_to_do(self, system: Path) -> None:
        nobody = ownership.overflow_uid()
        os.chown(system, nobody, nobody)
        os.chown(system / "agent.sock", nobody, nobody)
        with pytest.raises(ControlError, match=r"not mapped in this container.*DEVICES"):
            paths.socket_path()
