"""A detached process has no connections, and waiters for its return are notified."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelproxy.common.errors import ControlError, InternalError
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.ipc.detach import Absence, Return
from kernelproxy.kernel import activation
from kernelproxy.kernel.activation.state import Woken
from kernelproxy.kernel.files import tracker
from kernelproxy.kernel.restored_process import Restored, Revival, begin_history, obstacle

SECONDS = 60.0


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Absence:
    """The process's absence, replaced for this test."""
    made = Absence()
    monkeypatch.setattr(detach, "current", made)
    return made


@pytest.fixture
def control(away: Absence) -> Iterator[Control]:
    ours, theirs = socket.socketpair()
    with theirs, Control(ours) as made:
        yield made


def test_a_process_detaches_when_connections_are_closed(away: Absence, control: Control) -> None:
    thread = started(lambda: away.begin(SECONDS))
    control.close()
    thread.join()
    away.end(Return())


def test_a_connection_handed_over_does_not_prevent_detaching(
    away: Absence, control: Control
) -> None:
    with control.detach():
        away.begin(0.0)


def test_a_process_with_a_connection_does_not_detach(away: Absence, control: Control) -> None:
    with pytest.raises(ControlError, match="is waiting for the jupyter_sing daemon") as refused:
        away.begin(0.0)
    assert refused.value.reason == "busy"
    with away.connecting():  # is not detached
        pass


def test_a_process_with_an_obstacle_does_not_detach(away: Absence) -> None:
    kernel = SimpleNamespace(debugger=SimpleNamespace(debugpy_initialized=False))
    away.obstacle = lambda: obstacle(kernel)
    away.begin(SECONDS)
    away.end(Return())
    kernel.debugger.debugpy_initialized = True
    with pytest.raises(ControlError, match="debugger was used") as refused:
        away.begin(SECONDS)
    assert refused.value.reason == "unavailable"
    with away.connecting():  # is not detached
        pass


def test_an_unreferenced_connection_is_closed(away: Absence) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Control(ours)
        away.begin(SECONDS)


def test_connecting_waits_until_the_process_has_reattached(away: Absence, tmp_path: Path) -> None:
    away.begin(0.0)
    refused: list[str] = []

    def connecting() -> None:
        try:
            connect(start=False, path=tmp_path / "agent.sock")
        except ControlError as error:
            refused.append(error.reason)

    thread = started(connecting)
    assert not refused
    away.end(Return())
    thread.join()
    assert refused == ["no-daemon"]


def test_reattaching_is_notified(away: Absence) -> None:
    before = away.returns
    away.begin(0.0)
    thread = started(lambda: away.end(Return(restored=True)))
    assert away.wait(before, 0.0) == Return(restored=True)
    thread.join()
    with pytest.raises(ControlError, match="was not asked to leave"):
        away.wait(away.returns, 0.0)


@pytest.mark.parametrize("line", [b"", b"\0", b"[]", b"{}", b'{"restored": true}', b'{"ports": 1}'])
def test_an_invalid_line_is_not_parsed(line: bytes) -> None:
    assert Woken.parse(line) is None


def test_a_line_is_read() -> None:
    line = b'{"restored": true, "session": "s", "ports": {"5": 6}, "environment": {"A": "b"}}'
    assert Woken.parse(line) == Woken(True, "s", "", {5: 6}, {"A": "b"})


class DetachingKernel:
    """The parts of IPython and ipykernel that a restored process changes."""

    def __init__(self) -> None:
        self.key = b"of the saved one"
        self.parent = SimpleNamespace(
            connection_file="saved.json", shell_port=1, iopub_port=2, stdin_port=3, control_port=4,
            hb_port=5,
        )  # fmt: skip
        self.session = self
        self.sessions = 0

    def new_session(self) -> None:
        self.sessions += 1


@pytest.fixture
def kernel() -> DetachingKernel:
    return DetachingKernel()


@pytest.fixture
def revival(kernel: DetachingKernel) -> Revival:
    return Revival(SimpleNamespace(kernel=kernel, history_manager=kernel))


def test_a_kernel_that_hibernated_is_the_same_at_other_ports(
    revival: Revival, kernel: DetachingKernel
) -> None:
    revival(Woken(True, "s", ports={1: 11, 5: 15}))
    assert (kernel.parent.shell_port, kernel.parent.hb_port, kernel.parent.iopub_port) == (
        11, 15, 2,
    )  # fmt: skip
    assert (kernel.key, kernel.sessions) == (b"of the saved one", 0)


def test_a_kernel_in_the_place_of_another_one_is_known_as_that(
    revival: Revival, kernel: DetachingKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SING_TEST", "saved")
    monkeypatch.setenv(tracker.JOURNAL_VARIABLE, "/saved")
    file = tmp_path / "kernel.json"
    file.write_text('{"key": "of the other one"}')
    environment = {"SING_TEST": "other", tracker.JOURNAL_VARIABLE: "/other"}
    revival(Woken(True, "s", str(file), environment=environment))
    assert (kernel.key, kernel.sessions) == (b"of the other one", 1)
    assert kernel.parent.connection_file == str(file)
    assert {name: os.environ[name] for name in environment} == environment


def test_a_kernel_that_cannot_take_its_place_does_not_join(
    revival: Revival, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation.state, "on_restored", revival)
    monkeypatch.setattr(activation.state, "_current", activation.Activation("of old"))
    monkeypatch.setenv("SING_SESSION", "of old")
    with pytest.raises(InternalError, match="A restored kernel cannot take its place: FileNotF"):
        activation.state.restored(Woken(True, "s", str(tmp_path / "missing")))


def test_history_that_cannot_continue_is_off() -> None:
    history = SimpleNamespace(enabled=True)
    begin_history(history)
    assert history.enabled is False


def test_no_handler_of_exceptions_lets_a_restored_cell_continue() -> None:
    assert not issubclass(Restored, Exception)
    assert Restored("mine")._render_traceback_() == ["Restored 'mine' (its process)."]


def test_a_yielding_connection_is_requested_to_close(away: Absence, control: Control) -> None:
    def listen() -> None:
        with away.interruptible(control.abort) as way:
            there.set()
            with pytest.raises(ControlError):
                control.more()
            asked.append(way.asked)
        control.close()

    asked, there = list[bool](), threading.Event()
    thread = started(listen)
    assert there.wait(SECONDS)
    away.begin(SECONDS)
    thread.join()
    assert asked == [True]
    away.end(Return())


def test_a_connection_made_during_detaching_is_requested_to_close_at_once(away: Absence) -> None:
    away.begin(0.0)
    calls = []
    with away.interruptible(lambda: calls.append(1)) as way:
        assert (way.asked, calls) == (True, [1])
    away.end(Return())
    away.begin(0.0)
    assert calls == [1]  # a handler that was removed is not called
    away.end(Return())
