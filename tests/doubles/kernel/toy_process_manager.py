"""Process manager double for toy kernels: an image is a file of a few megabytes, without CRIU."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelproxy.agent.process.image_dirs import COMPLETE
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    CommitReplace,
    Done,
    Dump,
    Dumped,
    Error,
    HoldRequests,
    Knock,
    LetThrough,
    Message,
    Replace,
    Revive,
    Revived,
    Tend,
)
from kernelproxy.criu.images import Info
from tests.doubles.kernel.toy_kernel import image_path
from tests.doubles.session.client import WAIT_SECONDS

ROOT = Path(__file__).parents[3]
PAGES = 1024
PAGES_FILE, IMAGE_FILE = "pages-1.img", "toy.img"


class KernelProcess:
    """A process of `tests.doubles.kernel.toy_kernel`."""

    def __init__(self, session: str, image: str = "") -> None:
        self.session = session
        command = [sys.executable, "-m", "tests.doubles.kernel.toy_kernel", session]
        self.popen = subprocess.Popen(
            [*command, image] if image else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.asking = threading.RLock()
        if self._answer() != "ready":
            self.kill()
            raise AssertionError("the process does not join its session")

    @property
    def pid(self) -> int:
        return self.popen.pid

    def _answer(self) -> Any:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        return json.loads(line) if line else None

    def begin(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Send a command; return a function that waits for the answer, None if the process ends."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps([name, arguments]) + "\n")
        self.popen.stdin.flush()
        return self._answer

    def ask(self, name: str, *arguments: Any) -> Any:
        with self.asking:
            return self.begin(name, *arguments)()

    def lives(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        with self.asking:  # a thread that waits for an answer reads end of file first
            for pipe in (self.popen.stdin, self.popen.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class ToyProcessManager:
    """Owns one kernel, and carries out the agent's orders unless a test prevents it.

    Attributes
    ----------
    orders : list of str
        The orders so far, except those that it was too busy for.
    refuse : dict of str to str
        Reason for refusing orders of a kind.
    before, after : dict of str to callable
        Called once, before an order of a kind is carried out, and before it is answered.
    """

    def __init__(self, session: str, *, listens: bool = False, busy: bool = False) -> None:
        self.session, self.kernel = session, KernelProcess(session, "listen" if listens else "")
        self.beside: KernelProcess | None = None
        self.committed = False
        self.orders: list[str] = []
        self.refuse: dict[str, str] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        #: True if it refuses to hold requests because it is busy.
        self.busy = busy
        #: True if it holds requests to the kernel back.
        self.holds = False
        self._turn = threading.Lock()  # held by a caller, and while requests are held back
        self._changed = threading.Condition()
        self.connect()

    # ------------------------------------------------------------ the connection

    def connect(self) -> None:
        """Connect as the session's process manager."""
        connection = agent_client.connect(start=False)
        try:
            connection.call(Tend(self.session), WAIT_SECONDS)
        except BaseException:
            connection.close()
            raise
        self.sock = connection.detach()
        self._thread = threading.Thread(target=self._run, args=(self.sock,))
        self._thread.start()

    def disconnect(self) -> None:
        """Close the connection, whatever the agent does."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def wait_disconnected(self) -> None:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.disconnect()
        self.wait_disconnected()
        for kernel in (self.kernel, self.beside):
            if kernel is not None:
                kernel.kill()

    def request_process(self) -> None:
        send_message(self.sock, Knock())

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask the kernel as soon as requests pass; ask the agent for a process if it hibernates."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._turn.acquire(timeout=0.05):
            assert time.monotonic() < deadline, "it does not come back"
            if not self.kernel.lives():
                with contextlib.suppress(OSError):
                    self.request_process()
        try:
            return self.kernel.ask(name, *arguments)
        finally:
            self._turn.release()

    def wait_for(self, order: str, count: int = 1) -> None:
        """Wait until an order was given `count` times, and was answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.orders.count(order) >= count, WAIT_SECONDS)

    def _run(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while True:
                self._obey(sock)
        if self.committed:
            self._replace()

    def _obey(self, sock: socket.socket) -> None:
        order, _ = recv_message(sock)
        kind = order.wire_kind
        self.before.pop(kind, lambda: None)()
        try:
            reply: Message = self._carry_out(order)
        except (OSError, AssertionError) as error:
            reply = Error(f"{error}.", "failed")
        self.after.pop(kind, lambda: None)()
        send_message(sock, reply)
        if isinstance(reply, Error) and reply.reason == "busy":
            return
        with self._changed:
            self.orders.append(kind)
            self._changed.notify_all()

    # ------------------------------------------------------------ orders

    def _carry_out(self, order: Message) -> Message:
        why = self.refuse.get(order.wire_kind, "")
        match order:
            case _ if why and not isinstance(order, Dump):
                return Error(why, "failed")
            case HoldRequests():
                if self.busy:
                    return Error("It is busy.", "busy")
                if not self._turn.acquire(timeout=order.seconds):
                    return Error("It is busy.", "busy")
                self.holds = True
            case LetThrough():
                if self.beside is not None:
                    self.beside.kill()
                    self.beside, self.committed = None, False
                if self.holds:
                    self.holds = False
                    self._turn.release()
            case Dump():
                return self._dump(order, why)
            case Revive():
                return self._revive(order)
            case CommitReplace():
                self.committed = True
            case Replace():
                self._replace()
        return Done()

    def _replace(self) -> None:
        assert self.beside is not None
        with self.kernel.asking:  # until a pending request is answered
            self.kernel.kill()
        self.kernel, self.beside, self.committed = self.beside, None, False

    def _dump(self, order: Dump, why: str) -> Message:
        kernel, directory = self.kernel, Path(order.directory)
        if not why:
            save(kernel.pid, directory, order.wake_fd)
        if why or order.leave_running:
            wake(kernel.pid, order.wake_fd, self.session)
        else:
            kernel.kill()
        return Error(why, "dump") if why else Dumped(0.001)

    def _revive(self, order: Revive) -> Message:
        image = Path(order.directory) / IMAGE_FILE
        if not order.beside and self.kernel.lives():
            return Revived(self.kernel.pid)  # ordered again after the death of an agent
        self.session = order.session
        kernel = KernelProcess(order.session, str(image))
        if order.beside:
            self.beside = kernel
        else:
            self.kernel = kernel
        return Revived(kernel.pid)


def save(pid: int, directory: Path, wake_fd: int) -> None:
    """Save a detached process: what it has written, and pages of which a few are its own."""
    (directory / IMAGE_FILE).write_bytes(image_path(pid).read_bytes())
    pages = bytearray(random.Random(7).randbytes(PAGES * 4096))
    for page in random.Random(pid).sample(range(PAGES), PAGES // 50):
        pages[page * 4096 + 8 : page * 4096 + 16] = os.urandom(8)
    (directory / PAGES_FILE).write_bytes(pages)
    Info("root", 1, wake_fd, os.geteuid(), [], 0, 0, [], []).write(directory)
    (directory / "dump.log").write_text("what CRIU says")
    (directory / COMPLETE).write_bytes(b"all")


def wake(pid: int, wake_fd: int, session: str) -> None:
    """Reattach a kernel that has detached."""
    with open(f"/proc/{pid}/fd/{wake_fd}", "wb", buffering=0) as pipe:
        pipe.write(json.dumps({"restored": False, "session": session}).encode() + b"\n")
