"""Waiting users see the progress, once an operation takes a while."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jupyter_sing.cli import progress
from jupyter_sing.notebook import progress_bar, status_watcher
from jupyter_sing.notebook.progress_bar import ProgressBar
from kernelproxy.agent.checkpoint import progress as far
from kernelproxy.agent.checkpoint.progress import CheckpointProgress, with_progress
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Done, Error, Message, Progress, StatusRequest
from kernelproxy.storage.threads import Cancel
from tests.unit.fake_daemon import SESSION, FakeDaemon


class ReceivedText:
    """Connection double that records messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.came = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.came.set()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "PROGRESS_SECONDS", 0.001)


@pytest.mark.parametrize("by", ["the work", "who knows"])
def test_progress_is_sent_until_the_work_is_done(by: str) -> None:
    async def run() -> None:
        received: Any = ReceivedText()

        async def work(note: Any) -> str:
            if by == "the work":
                note(3, 10)
            await received.came.wait()
            return "done"

        ask = None if by == "the work" else lambda: (3, 10)
        assert await with_progress(received, None, work, ask) == "done"
        assert set(received.messages) == {Progress(3, 10)}

    asyncio.run(run())


@pytest.mark.parametrize("waited_for", [True, False])
def test_work_ends_when_its_caller_is_cancelled(waited_for: bool) -> None:
    async def run() -> None:
        received: Any = ReceivedText()
        cancel = Cancel() if waited_for else None

        async def work(_: Any) -> None:
            try:
                while True:
                    await asyncio.sleep(0)
                    if cancel is not None:
                        cancel.check()
            finally:
                ended.set()

        ended = asyncio.Event()
        task = asyncio.create_task(with_progress(received, cancel, work))
        await received.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(run())


@pytest.mark.parametrize("reply", [Done("So it is."), Error("It is not.", "failed")])
def test_reply_arrives_after_progress(reply: Message) -> None:
    ours, theirs = socket.socketpair()

    def answer() -> None:
        recv_message(theirs)
        for each in (Progress(0, 2), Progress(1, 2), reply):
            send_message(theirs, each)

    thread = threading.Thread(target=answer)
    thread.start()
    shown: list[tuple[int, int]] = []
    with theirs, Control(ours) as control:
        if isinstance(reply, Done):
            found = control.expect(
                Done, StatusRequest(), 60.0, lambda *numbers: shown.append(numbers)
            )
            assert found == reply
        else:
            with pytest.raises(ControlError, match="It is not"):
                control.expect(Done, StatusRequest(), 60.0, lambda *numbers: shown.append(numbers))
        thread.join()
    assert shown == [(0, 2), (1, 2)]


class ProgressClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_terminal_shows_progress_after_half_a_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ProgressClock()
    monkeypatch.setattr(progress, "time", clock)
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        clock.now = 0.0
        with progress.ProgressLine("Reading") as line:
            line.show_bytes(1 << 20, 3 << 20)
            assert capsys.readouterr().err == ""
            clock.now = 0.5
            line.show_bytes(0, 0)
            assert capsys.readouterr().err == ""
            line.show_bytes(2 << 20, 3 << 20)
            line.show_notebooks(2, 2)
        shown = (
            "\r\x1b[KReading [#############.......] 2.0 MiB of 3.0 MiB"
            "\r\x1b[KReading [####################] 2 of 2 notebooks\r\x1b[K"
        )
        assert capsys.readouterr().err == (shown if terminal else "")
    with progress.ProgressLine("Reading", wanted=False) as line:
        clock.now = 60.0
        line.show_bytes(1, 3)
    assert capsys.readouterr().err == ""


def test_status_has_the_operation_in_progress_until_it_ends() -> None:
    underway = CheckpointProgress()
    assert underway.describe() is None
    with underway.doing("restore", "one") as note, underway.doing("checkpoint", "two"):
        note(3, 10)
        assert underway.far("restore", "one") == (3, 10)
        assert underway.far("checkpoint", "two") == (0, 0)
        expected = {"verb": "restore", "checkpoint": "one", "done": 3, "total": 10}
        assert underway.describe() == expected
    note(4, 10)  # its thread has not noticed
    assert underway.far("restore", "one") == (0, 0)
    assert underway.describe() is None


class Timer:
    """Fires when the test requests it."""

    made: list[Timer] = []  # noqa: RUF012

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.cancelled = self.daemon = False
        self.fire = lambda: None if self.cancelled else function()
        self.made.append(self)

    def start(self) -> None:
        """See `threading.Timer`."""

    def cancel(self) -> None:
        """See `threading.Timer`."""
        self.cancelled = True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Yield the texts that a notebook shows; time stands still."""
    texts = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            texts.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        texts.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr(progress_bar, "time", ProgressClock())
    monkeypatch.setattr("threading.Timer", Timer)
    monkeypatch.setattr("IPython.display.display", display)
    Timer.made = []
    return texts


def test_notebook_shows_progress_after_half_a_second(shown: list[str]) -> None:
    clock: Any = vars(progress_bar)["time"]
    with ProgressBar("Reading") as bar:
        bar.show(1, 10)
        clock.now = 0.5
        bar.show(2, 10)
        bar.show(3, 10)
        in_thread(Timer.made[0].fire)  # the numbers say more
    assert shown == ["Reading: 2 B of 10 B", "Reading: 3 B of 10 B", ""]


def test_notebook_shows_progress_of_unknown_size(shown: list[str]) -> None:
    with ProgressBar("Reading"):
        (timer,) = Timer.made
        in_thread(timer.fire)
    assert shown == ["Reading …", ""]
    in_thread(timer.fire)
    assert shown == ["Reading …", ""]


def test_short_operation_shows_no_progress(shown: list[str]) -> None:
    with ProgressBar("Reading") as bar:
        bar.show(1, 10)
    in_thread(Timer.made[0].fire)
    assert shown == []


def test_notebook_shows_the_reason_for_waiting(
    shown: list[str], fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = status_watcher.StatusWatcher()
    monkeypatch.setattr(status_watcher, "current", watcher)
    queued = SESSION | {"state": "queued", "queue_position": 1, "expected_wait": 20.0}
    fake_daemon.sessions[SESSION["id"]] = queued
    with ProgressBar("Resuming", SESSION["id"]):
        in_thread(Timer.made[0].fire)
        while len(shown) < 2:
            threading.Event().wait(0.01)
        fake_daemon.tell(queued | {"state": "restoring", "queue_position": None})
        while len(shown) < 3:
            threading.Event().wait(0.01)
    assert shown == [
        "Resuming …",
        "Resuming: You are next, about 20 s.",
        "Resuming: Restoring",
        "",
    ]


def in_thread(function: Callable[[], object]) -> None:
    """Run a function in a thread of its own, so that its signal mask does not matter."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
