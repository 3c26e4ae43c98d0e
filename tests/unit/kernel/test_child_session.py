"""Sessions of child processes: what they request of the daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import OpenSession
from kernelproxy.kernel.activation import child_session
from tests.unit.fake_daemon import FakeDaemon


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module that stands for the program; it has no file."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    for name in ("RANK", "LOCAL_RANK", "SING_NAME", "SING_DEVICE", "SING_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    return module


def opened(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, parent: str = "", **env: str
) -> OpenSession:
    """Open a session; return the request."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert child_session.open_session(parent) in daemon.sessions
    request = daemon.requests[-1]
    assert isinstance(request, OpenSession)
    return request


def test_a_child_opens_a_session_below_its_parents(
    fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, main_module: ModuleType
) -> None:
    request = opened(fake_daemon, monkeypatch, "of-the-notebook", JUPYTERHUB_USER="ada")
    assert (request.parent, request.user, request.device) == ("of-the-notebook", "ada", None)
    assert (request.script, request.kernel_id, request.python) == (True, "", sys.executable)
    again = opened(fake_daemon, monkeypatch, "of-the-notebook")
    assert again.key != request.key  # another session, not the same one once more


def test_a_child_without_a_parent_names_none(
    fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, main_module: ModuleType
) -> None:
    request = opened(fake_daemon, monkeypatch, SING_DEVICE="cpu:1")
    assert (request.parent, request.device) == ("", "cpu:1")


@pytest.mark.parametrize(
    ("file", "env", "name"),
    [
        (None, {}, ""),  # the daemon appends it to the parent's name
        (None, {"RANK": "2"}, " rank 2"),
        ("/x/train.py", {}, "train.py"),
        ("/x/train.py", {"RANK": "5", "LOCAL_RANK": "1"}, "train.py rank 5"),
        ("/x/train.py", {"LOCAL_RANK": "1"}, "train.py rank 1"),
        # Of a program that a rank of `jupyter sing run --name mine` has started: its own.
        ("/x/eval.py", {"SING_NAME": "mine", "SING_LAUNCHER": "1"}, "eval.py"),
        (None, {"SING_NAME": "mine", "SING_LAUNCHER": "1"}, "mine"),
    ],
)
def test_a_session_is_named_after_its_program_and_rank(
    fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, main_module: ModuleType,
    file: str | None, env: dict[str, str], name: str,
) -> None:  # fmt: skip
    if file is not None:
        main_module.__file__ = file
    assert opened(fake_daemon, monkeypatch, **env).name == name


def test_a_rank_of_run_is_named_as_the_command_says(
    fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, main_module: ModuleType
) -> None:
    main_module.__file__ = "/x/train.py"
    launcher = str(os.getppid())
    env = {"SING_NAME": "mine", "SING_LAUNCHER": launcher, "RANK": "0"}
    assert opened(fake_daemon, monkeypatch, **env).name == "mine rank 0"


def test_a_child_starts_no_daemon(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, main_module: ModuleType
) -> None:
    monkeypatch.setenv("SING_SOCKET", str(runtime_dir / "agent.sock"))
    with pytest.raises(ControlError):
        child_session.open_session("s")
    assert not (runtime_dir / "agent.sock").exists()
