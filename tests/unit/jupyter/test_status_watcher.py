"""One thread with one connection for all listeners, only while there is a listener."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_sing.notebook import status_watcher
from jupyter_sing.notebook.status_watcher import ElsewhereError, KnownStatus, StatusWatcher
from kernelproxy.common import protocol
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.detach import Absence, Return
from kernelproxy.common.protocol import Changed, SessionReply
from tests.unit.fake_daemon import CHECKPOINT, DEVICE, SESSION, FakeDaemon

SECONDS = 120.0
ID = SESSION["id"]


class Ear:
    """Listener of a watcher."""

    def __init__(self) -> None:
        self.received: queue.Queue[KnownStatus] = queue.Queue()

    def __call__(self, seen: KnownStatus) -> None:
        self.received.put(seen)

    def next(self) -> KnownStatus:
        return self.received.get(timeout=SECONDS)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Absence:
    """The process's absence, replaced for this test."""
    made = Absence()
    monkeypatch.setattr(detach, "current", made)
    return made


@pytest.fixture
def watcher(away: Absence, fake_daemon: FakeDaemon) -> Iterator[StatusWatcher]:
    made = StatusWatcher()
    yield made
    for each in list(made._listeners):
        made.leave(each)
    wait_for_no_thread()


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "jupyter_sing watch"]


def wait_for_no_thread() -> None:
    for each in threads():
        each.join(SECONDS)
    assert threads() == []


def test_listener_receives_the_status_and_then_changes(
    watcher: StatusWatcher, fake_daemon: FakeDaemon
) -> None:
    ear = Ear()
    watcher.join(ear)
    first = ear.next()
    assert (first.devices, first.sessions) == ((DEVICE,), {ID: SESSION})
    assert first.anew
    fake_daemon.tell(SESSION | {"state": "suspended"}, SESSION | {"id": "b"})
    second = ear.next()
    assert second.sessions[ID]["state"] == "suspended"
    assert not second.anew
    devices = [DEVICE | {"memory_used": 1}, DEVICE | {"id": "cpu:1"}]
    fake_daemon.watchers[0].put(Changed([], devices, ["b"]))
    third = ear.next()
    assert list(third.sessions) == [ID]
    assert [(each["id"], each["memory_used"]) for each in third.devices] == [
        ("cpu:0", 1), ("cpu:1", 3 << 20),
    ]  # fmt: skip


def test_listeners_share_one_thread_which_ends_with_the_last(
    watcher: StatusWatcher, fake_daemon: FakeDaemon
) -> None:
    ears = [Ear() for _ in range(5)]
    for ear in ears:
        watcher.join(ear)
        watcher.join(ear)  # idempotent
        assert ear.next().sessions
    assert len(threads()) == 1
    assert len(fake_daemon.watchers) == 1
    for ear in ears:
        watcher.leave(ear)
        watcher.leave(ear)
    wait_for_no_thread()
    watcher.join(ears[0])  # and a new thread starts
    assert ears[0].next().anew


def test_failing_listener_is_removed(
    watcher: StatusWatcher, fake_daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, status_watcher.__name__)
    calls, ear = [], Ear()

    def deaf(seen: KnownStatus) -> None:
        calls.append(seen)
        raise RuntimeError

    watcher.join(ear)
    ear.next()
    watcher.join(deaf)
    fake_daemon.tell()
    ear.next()
    assert len(calls) == 1
    assert caplog.messages == ["A listener failed and gets no more updates."]


def test_watcher_finds_the_next_daemon(watcher: StatusWatcher, fake_daemon: FakeDaemon) -> None:
    ear = Ear()
    watcher.join(ear)
    ear.next()
    fake_daemon.drop_watchers()
    lost = ear.next()
    assert lost.problem == status_watcher.LOST
    assert lost.sessions == {ID: SESSION}  # as last received
    found = ear.next()
    assert (found.problem, found.anew) == ("", True)


def test_missing_daemon_is_reported(
    runtime_dir: Path, away: Absence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_watcher, "_PAUSE_SECONDS", 0.01)
    watcher, ear = StatusWatcher(), Ear()
    watcher.join(ear)
    assert ear.next().problem == "No jupyter_sing daemon is running."
    daemon = FakeDaemon(runtime_dir / "agent.sock")
    while ear.next().problem:
        pass
    watcher.leave(ear)
    wait_for_no_thread()
    daemon.close()
    assert status_watcher.look().problem


def test_watcher_detaches_with_the_process_and_reattaches(
    watcher: StatusWatcher, away: Absence, fake_daemon: FakeDaemon
) -> None:
    ear = Ear()
    watcher.join(ear)
    ear.next()
    away.begin(SECONDS)
    assert ear.received.empty()  # it is not reported as a failure
    away.end(Return())
    assert ear.next().anew


@pytest.mark.parametrize("restored", [True, False])
def test_restored_process_updates_listeners_when_its_predecessor_ends(
    watcher: StatusWatcher, away: Absence, fake_daemon: FakeDaemon, restored: bool
) -> None:
    away.begin(SECONDS)
    away.end(Return(restored=restored))
    ear = Ear()
    watcher.join(ear)
    ear.next()
    fake_daemon.tell(SESSION)
    assert not ear.next().anew
    fake_daemon.tell(gone=["other"])
    assert ear.next().anew == restored


def test_request_is_repeated_after_the_process_reattaches(
    away: Absence, fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Semaphore(0), threading.Event()
    usual = fake_daemon._answer

    def slow(request: protocol.Message) -> protocol.Message:
        asked.release()
        assert answer.wait(SECONDS)
        return usual(request)

    monkeypatch.setattr(fake_daemon, "_answer", slow)
    replies: list[SessionReply] = []
    request = protocol.Suspend(ID, "")
    thread = threading.Thread(
        target=lambda: replies.append(status_watcher.ask(SessionReply, request))
    )
    thread.start()
    assert asked.acquire(timeout=SECONDS)
    away.begin(SECONDS)
    away.end(Return())
    assert asked.acquire(timeout=SECONDS)
    answer.set()
    thread.join()
    assert replies[0].session["state"] == "suspended"


@pytest.mark.parametrize(("known", "restored"), [(True, False), (False, False), (False, True)])
def test_checkpoint_is_followed_while_the_process_detaches(
    away: Absence,
    fake_daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
    restored: bool,
) -> None:
    requests: queue.Queue[protocol.Message] = queue.Queue()
    answers: queue.Queue[protocol.Message] = queue.Queue()

    left = threading.Event()

    def by_hand(request: protocol.Message) -> protocol.Message:
        requests.put(request)
        if not left.is_set():
            left.wait(SECONDS)
            return protocol.Done()  # which is not received
        return answers.get(timeout=SECONDS)

    monkeypatch.setattr(fake_daemon, "_answer", by_hand)
    made: list[Any] = []

    def take() -> None:
        try:
            made.append(status_watcher.checkpoint(ID, "mine"))
        except ControlError as error:
            made.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert requests.get(timeout=SECONDS) == protocol.Checkpoint(ID, "mine")
    away.begin(SECONDS)
    left.set()
    away.end(Return(restored=restored))
    if not restored:
        assert requests.get(timeout=SECONDS) == protocol.AwaitCheckpoint(ID, "mine")
        if not known:  # it has detached for another checkpoint
            answers.put(protocol.Error("It was not made.", "ended"))
            assert requests.get(timeout=SECONDS) == protocol.Checkpoint(ID, "mine")
        answers.put(protocol.CheckpointReply(CHECKPOINT))
    thread.join()
    assert [type(each) for each in made] == [ElsewhereError if restored else dict]


def test_refusal_is_raised(away: Absence, fake_daemon: FakeDaemon) -> None:
    with pytest.raises(ControlError, match="There is no session"):
        status_watcher.ask(SessionReply, protocol.Resume("other"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # others with threads, too
def test_forked_child_has_no_watcher(watcher: StatusWatcher, fake_daemon: FakeDaemon) -> None:
    ear = Ear()
    watcher.join(ear)
    ear.next()
    held = watcher._watch
    assert held is not None
    assert held._control is not None
    fd = held._control._sock.fileno() if held._control._sock else -1
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            detach.current.reset()
            watcher.disown()
            closed = not Path(f"/proc/self/fd/{fd}").exists()
            os.write(writer, b"1" if closed and watcher._watch is None else b"0")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
    fake_daemon.tell()
    ear.next()  # the parent still receives updates
