"""A kernel without Python state: ``python -m tests.doubles.kernel.toy_kernel SESSION [IMAGE]``.

Reads commands, one line of JSON each, and answers each with one line: see `Kernel`. With the file
of an image it is the process restored from it, and reattaches to the session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, NativeError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.ipc.detach import Absence
from kernelproxy.common.protocol import (
    Attach,
    AwaitCheckpoint,
    Checkpoint,
    CheckpointBegun,
    CheckpointReply,
    JoinJob,
    KernelRequest,
    Listen,
    OpenSession,
    OpenSessionReply,
    Progress,
    RestoreReply,
    TakeOver,
)
from kernelproxy.common.protocol.views import CheckpointView, RestoreView
from kernelproxy.common.shared_memory import close_all
from kernelproxy.kernel import activation
from kernelproxy.kernel.activation.agent_connection import Link
from tests.doubles.session.client import TORCH, WAIT_SECONDS, ToyClient

ABOUT = {"saved": [{"name": "x", "kind": "int", "bytes": 3}], "omitted": []}


class Client(ToyClient):
    """Client that writes an image of its state when it detaches."""

    def __init__(self, session: str) -> None:
        self.present = threading.Lock()  # held while the device is used, and while it is detached
        super().__init__(session)

    def leave(self, seconds: float) -> None:
        if not self.present.acquire(timeout=seconds):
            raise NativeError("a cell uses the device")
        super().leave(seconds)
        save_image({"left": self.left.hex(), "state": self.state})

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        super().rejoin(fds, bell_fd)
        self.present.release()


class RestoredClient(Client):
    """Client whose process was restored from an image."""

    def __init__(self, session: str, image: dict[str, Any]) -> None:
        self.session, self.present = session, threading.Lock()
        self.present.acquire()
        self.left, self.state = bytes.fromhex(image["left"]), image["state"]
        self.gone, self.absence = threading.Event(), Absence()
        attach, path = Attach(session, TORCH), paths.socket_path()
        self.link = Link(-1, attach, path, lambda: self._tried(self.gone), self, self.absence)
        self.tried = threading.Event()
        self.link.start()
        assert self.tried.wait(WAIT_SECONDS)
        assert not self.gone.is_set()

    def _tried(self, how: threading.Event | None = None) -> None:
        if how is not None:
            how.set()
        self.tried.set()

    def rejoin(self, fds: Sequence[int], bell_fd: int) -> None:
        super().rejoin(fds, bell_fd)
        self._tried()


def save_image(image: dict[str, Any]) -> None:
    """Write the data that represents this process's memory."""
    image_path(os.getpid()).write_text(json.dumps(image))


def image_path(pid: int) -> Path:
    """Return the path of a process's image."""
    return paths.runtime_dir() / f"toy-{pid}.json"


class Listener:
    """Kernel without a device."""

    def __init__(self, session: str) -> None:
        self.session = session
        save_image({})
        self.gone, self.absence = threading.Event(), Absence()
        self.link = Link(
            -1, Listen(session), paths.socket_path(), self.gone.set, None, self.absence
        )
        self.link.start()


class ToyKernel:
    """Commands that a test may send to the process, by name."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._children: list[subprocess.Popen[str]] = []

    def work(self, number: int) -> int:
        """Change the device's state, and read it."""
        with self.client.present, self.client.cell():
            self.client.add(number)
            assert self.client.read() == self.client.state
        return int(self.client.state)

    def run(self) -> None:
        """Run a cell that does not use the device."""
        if isinstance(self.client, Client):
            with self.client.present, self.client.cell():
                return
        self.client.link.report_cells(1)

    def rest(self) -> None:
        """Do nothing."""

    def read(self) -> int:
        """Read the device's state."""
        with self.client.present, self.client.cell():
            assert self.client.read() == self.client.state
        return int(self.client.state)

    def checkpoint(self, name: str, form: str = "", automatic: bool = False) -> CheckpointView:
        """Make a checkpoint, as a kernel does, and wait until it is stored."""
        fds = [os.memfd_create(each) for each in ("host", "files")]
        os.write(fds[0], b"x")
        client, returns = self.client, self.client.absence.returns
        position = client.page.head if isinstance(client, ToyClient) else 0
        host = {"position": position, "parts": [1], "storages": [], "about": ABOUT, "files": []}
        connection = agent_client.connect(start=False)
        try:
            request = Checkpoint(client.session, name, automatic, host, form)
            reply, _ = connection.call_with_fds(request, WAIT_SECONDS, fds)
            assert isinstance(reply, CheckpointBegun)
            if reply.leaves:
                connection.close()
                client.absence.wait(returns, WAIT_SECONDS)
                connection = agent_client.connect(start=False)
                answer = connection.call(AwaitCheckpoint(client.session, name), WAIT_SECONDS)
            else:
                answer = connection.more(WAIT_SECONDS)
            while isinstance(answer, Progress):
                answer = connection.more(WAIT_SECONDS)
        finally:
            connection.close()
            close_all(fds)
        assert isinstance(answer, CheckpointReply)
        return answer.checkpoint

    def take_over(self, name: str) -> RestoreView:
        """Replace this process by the process of a checkpoint."""
        with agent_client.connect(start=False) as connection:
            request = TakeOver(self.client.session, name)
            return connection.expect(RestoreReply, request, WAIT_SECONDS).outcome

    def start(self) -> list[Any]:
        """Start a process of this kind with a session below this one's; return its id and pid."""
        request = OpenSession(" rank", "", sys.executable, script=True, parent=self.client.session)
        with agent_client.connect(start=False) as connection:
            session = connection.expect(OpenSessionReply, request, WAIT_SECONDS).session
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.doubles.kernel.toy_kernel", session],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(process)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "ready"
        return [session, process.pid]

    def tell(self, number: int, name: str, *arguments: Any) -> Any:
        """Pass a command on to a process that it has started, and return the answer."""
        process = self._children[number]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, arguments]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def refuse(self, why: str) -> None:
        """Do not detach any more, for a reason; "": detach again."""
        self.client.absence.obstacle = lambda: why

    def end_instead(self) -> None:
        """End when asked to detach."""
        self.client.absence.obstacle = lambda: os._exit(0)

    def join(self, job: str, rank: int, size: int) -> None:
        """Report that this is a rank of a job."""
        with agent_client.connect(start=False) as connection:
            connection.call(JoinJob(self.client.session, job, rank, size), WAIT_SECONDS)

    def gone(self) -> bool:
        """True if the session has ended."""
        return bool(self.client.gone.wait(WAIT_SECONDS))


def main(session: str, image: str = "") -> None:
    """Answer commands until the input ends."""
    client: Any
    begun = threading.Event()

    def wished(kernel_request: KernelRequest) -> None:
        begun.wait()
        kernel.checkpoint(kernel_request.name, kernel_request.form, kernel_request.automatic)

    # Not in the link's thread, which has to detach meanwhile.
    activation.state.on_request = lambda kernel_request: threading.Thread(
        target=wished, args=(kernel_request,)
    ).start()
    saved = json.loads(Path(image).read_text()) if image not in ("", "listen") else {}
    if saved:
        client = RestoredClient(session, saved)
    elif image:
        client = Listener(session)
    else:
        client = Client(session)
    kernel = ToyKernel(client)
    begun.set()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = getattr(kernel, name)(*arguments)
        except ControlError as error:
            answer = {"error": error.message, "reason": error.reason}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
