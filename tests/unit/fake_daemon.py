"""A daemon that speaks the protocol and keeps its sessions in a dictionary."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from kernelproxy.common import protocol
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Error, Message
from kernelproxy.common.protocol.views import (
    CheckpointView,
    DeviceView,
    DifferenceView,
    ExactnessView,
    MigrationView,
    RestoreView,
    SessionView,
)

View = TypeVar("View")

SECONDS_MAX = 60.0
DEVICE: DeviceView = {
    "id": "cpu:0",
    "kind": "software",
    "name": "Software device (2 CPU threads)",
    "memory_total": 2 << 30,
    "memory_used": 3 << 20,
    "sessions": ["0123abcd"],
    "failure": "",
}
SESSION: SessionView = {
    "id": "0123abcd",
    "name": "digits.ipynb",
    "owner": "ada",
    "kernel_id": "k-1",
    "kernel_pid": 11,
    "worker_pid": 12,
    "state": "idle",
    "tier": "resident",
    "device": "cpu:0",
    "memory": 3 << 20,
    "log_head": 100,
    "log_consumed": 100,
    "log_bytes": 100,
    "last_activity": "2026-01-01T00:00:00+00:00",
    "operators": 1234,
    "gpu_seconds": 0.5,
    "step_seconds": 0.01,
    "memory_nadir": 1024,
    "recoverable": True,
    "queued_for": 0.0,
    "queue_position": None,
    "expected_wait": None,
    "suspended_by": None,
    "suspended_at": None,
    "pinned": False,
    "priority": None,
    "reason": "Idle.",
    "served_as": "standard",
    "promised": 0.7,
    "shared": None,
    "loading": 0,
    "snapshot": None,
    "migration": None,
    "exactness": None,
    "automatic": {"every": 0.0, "cells": 0, "keep": 3, "problem": ""},
    "last_checkpoint": None,
    "progress": None,
    "parent": "",
    "job": "",
    "rank": None,
    "ranks": None,
}
EXACTNESS: ExactnessView = {
    "deterministic": False,
    "approximate_since": None,
    "recovered_since": None,
    "diverged": 0,
}
MIGRATION: MigrationView = {
    "source": "cpu:0",
    "target": "cpu:1",
    "seconds": 0.5,
    "downtime": 0.02,
    "bytes": 3 << 20,
}


CHECKPOINT: CheckpointView = {
    "name": "before-lunch",
    "created": "2026-01-01T12:00:00.000+00:00",
    "session": "digits.ipynb",
    "notebook": "/home/ada/digits.ipynb",
    "kernel_id": "k-1",
    "automatic": False,
    "forms": ["namespace", "process"],
    "torch": "2.13.0+cpu",
    "device": "cpu:0",
    "bytes": 3 << 20,
    "stored": 2 << 20,
    "exclusive": 1 << 20,
    "saved": [{"name": "model", "kind": "Sequential", "bytes": 3 << 20}],
    "omitted": [{"name": "/home/ada/big.csv", "why": "it is too large", "partly": False}],
    "only_process": [
        {"name": "lines", "why": "a generator", "partly": False},
        {"name": "lock", "why": "a lock", "partly": False},
        {"name": "lock", "why": "and another one", "partly": True},
    ],
    "files": 2,
}
DAMAGED: CheckpointView = {"name": "torn", "created": "", "problem": "Its hash is wrong."}
OUTCOME: RestoreView = {
    "checkpoint": "before-lunch",
    "variables": 2,
    "files": 1,
    "aside": {"/home/ada/table.csv": "/data/aside/before-lunch/home/ada/table.csv"},
    "problems": [{"name": "frame", "why": "there is no module pandas", "partly": False}],
}


AFFECTED: DifferenceView = {
    "text": "ada (lab): weight 1 -> 2",
    "who": ["ada"],
    "place": "lab",
    "changes": ["weight 1 -> 2"],
    "consequences": [],
}
NOTES = ["The policy describes 1 host of 4 devices, and this daemon has 2."]


def changed(view: View, changes: Mapping[str, Any]) -> View:
    """Return a view with other values."""
    return cast(View, {**cast(dict[str, Any], view), **changes})


class FakeAgent:
    """An agent's end of a process manager's connection; `close` simulates its death."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(SECONDS_MAX)

    def order(self, message: Message) -> Message:
        """Send an order; return its answer."""
        send_message(self._sock, message)
        return self.hear()

    def hear(self) -> Message:
        """Receive a message of the process manager."""
        return recv_message(self._sock)[0]

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


class FakeDaemon:
    """Listens at `path` until it is closed; `requests` has the received requests in order."""

    def __init__(self, path: Path) -> None:
        self.requests: list[Message] = []
        self.sessions: dict[str, SessionView] = {}
        #: Answer to opened sessions: the form of processes, or the reason why there is none.
        self.form: tuple[dict[str, Any] | None, str] = (None, "CRIU is not installed")
        self.policy = ""
        #: True if it has lost all sessions.
        self.forgotten = False
        #: Messages that it sends before it has made or restored a checkpoint.
        self.progress: list[Message] = []
        #: Number of further requests to which it answers that the kernel is not connected yet.
        self.too_early = 0
        #: If set, callers that request a checkpoint wait. Released for each that has disconnected.
        self.busy = False
        self.disconnected = threading.Semaphore(0)
        #: Connections of process managers, whose orders the test sends.
        self.managers: queue.Queue[FakeAgent] = queue.Queue()
        self._agents: list[FakeAgent] = []
        self._closed = False
        #: Pending messages of each subscriber.
        self.watchers: list[queue.SimpleQueue[Message | None]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._closed = True
        self.drop_watchers()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for agent in self._agents:
            agent.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                sock, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            while True:
                request, _ = recv_message(sock)
                self.requests.append(request)
                if isinstance(request, protocol.Checkpoint | protocol.Restore):
                    for each in self.progress:
                        send_message(sock, each)
                if self.busy and isinstance(request, protocol.Checkpoint):
                    assert sock.recv(1) == b""
                    self.disconnected.release()
                    return
                if isinstance(request, protocol.WatchRequest):
                    self._be_watched(sock)
                    return
                send_message(sock, self._answer(request))
                if isinstance(request, protocol.Tend) and not self.forgotten:
                    self._agents.append(FakeAgent(sock.dup()))
                    self.managers.put(self._agents[-1])
                    return

    def _be_watched(self, sock: socket.socket) -> None:
        """Send changes to a subscriber, until `close` or `drop_watchers`."""
        news: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.watchers.append(news)
        if self._closed:
            return
        send_message(sock, self._answer(protocol.StatusRequest()))
        while (message := news.get()) is not None:
            send_message(sock, message)

    def tell(self, *sessions: SessionView, gone: Sequence[str] = ()) -> None:
        """Send subscribers what has changed."""
        for news in self.watchers:
            news.put(protocol.Changed(list(sessions), [], list(gone)))

    def drop_watchers(self) -> None:
        """Close the connections of subscribers."""
        while self.watchers:
            self.watchers.pop().put(None)

    def _answer(self, request: Message) -> Message:
        match request:
            case protocol.Checkpoint() | protocol.Restore() if self.too_early:
                self.too_early -= 1
                return Error("Its kernel cannot be reached.", "unavailable")
            case protocol.StatusRequest():
                return protocol.StatusReply([DEVICE], list(self.sessions.values()))
            case protocol.OpenSession(name=name, kernel_id=kernel_id):
                session = f"s{len(self.sessions)}"
                self.sessions[session] = SESSION | {
                    "id": session, "name": name, "kernel_id": kernel_id,
                }  # fmt: skip
                return protocol.OpenSessionReply(session, *self.form)
            case protocol.Listen():  # a connection that is left open could not be saved
                return Error("Nobody speaks to kernels here.", "unknown-session")
            case protocol.Tend() if self.forgotten:
                return Error("There is no such session.", "unknown-session")
            case protocol.CloseSession(session=session):
                self.sessions.pop(session, None)
                return protocol.Done()
            case protocol.Suspend(session=session, reason=why):
                said = f"{why}. Resumes when you run a cell."
                return self._change(
                    session, state="suspended", reason=said, tier="parked", worker_pid=None
                )
            case protocol.Resume(session=session):
                return self._change(
                    session, state="idle", reason="Idle.", tier="resident", worker_pid=12
                )
            case protocol.MigrateRequest(session=session, device="cpu:1"):
                return self._change(session, device="cpu:1", migration=MIGRATION)
            case protocol.MigrateRequest(device=device):
                return Error(f"There is no device {device}, only cpu:0, cpu:1.", "unknown-device")
            case protocol.Pin(session=session, pinned=pinned):
                return self._change(session, pinned=pinned)
            case protocol.SetPriority(session=session, level="standard" | "basic" as level):
                return self._change(session, priority=level)
            case protocol.SetDeterministic(session=session, on=on):
                return self._change(session, exactness=EXACTNESS | {"deterministic": on})
            case protocol.SetPriority(level="premium"):
                return Error("Premium is for others.", "not-allowed")
            case protocol.SetPriority(level=level):
                return Error(f"There is no priority {level!r}.", "bad-request")
            case protocol.Checkpoint(name=name):
                return protocol.CheckpointReply(CHECKPOINT | {"name": name or CHECKPOINT["name"]})
            case protocol.CheckpointsRequest():
                return protocol.CheckpointsReply([CHECKPOINT, DAMAGED])
            case protocol.LastCheckpoint():
                return protocol.CheckpointReply(CHECKPOINT)
            case protocol.SetAutomatic(session=session, every=every, cells=cells):
                rule = {**SESSION["automatic"], "every": every, "cells": cells}
                return self._change(session, automatic=rule)
            case protocol.GetPolicy():
                return protocol.PolicyReply(self.policy)
            case protocol.SetPolicy(policy=policy, dry=dry):
                if "wieght" in policy:
                    return Error("defaults.wieght: is no key here (line 1)", "bad-policy")
                affected = [] if policy == self.policy else [AFFECTED]
                self.policy = self.policy if dry else policy
                return protocol.PolicyApplied(affected, NOTES)
            case protocol.Stop():
                return protocol.StopReply(["digits-auto"], ["maths.ipynb: it was busy for 30 s."])
            case protocol.Restore(name="before-lunch"):
                return protocol.RestoreReply(OUTCOME)
            case protocol.Restore(name=name) | protocol.DeleteCheckpoint(name=name) if (
                name != "before-lunch"
            ):
                return Error(f"There is no checkpoint {name!r}.", "unknown-checkpoint")
            case _:
                return protocol.Done()

    def _change(self, session: str, **changes: Any) -> Message:
        if session not in self.sessions:
            return Error(f"There is no session {session}.", "unknown-session")
        self.sessions[session] = changed(self.sessions[session], changes)
        self.tell(self.sessions[session])
        return protocol.SessionReply(self.sessions[session])
