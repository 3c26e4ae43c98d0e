"""Real kernels under the provisioner ``sing``, driven over their own protocol."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from traitlets.config import Config

from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import StatusReply, StatusRequest
from kernelproxy.common.protocol.views import SessionView

SECONDS_MAX = 120.0
#: A kernel with a shorter timeout for a slow daemon would continue without a session.
PATIENT = Config({"SingProvisioner": {"open_timeout": SECONDS_MAX}})


@dataclass
class Ran:
    """Output of a cell: text, displayed data and errors."""

    stdout: str = ""
    stderr: str = ""
    shown: list[str] = field(default_factory=list)
    error: str = ""
    error_text: str = ""


class Kernel:
    """A kernel and its client."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str) -> Ran:
        """Run a cell to its end."""
        return self.finish(self.begin(code))

    def begin(self, code: str) -> str:
        """Start a cell; `finish` waits for it."""
        return str(self.client.execute(code))

    def finish(self, cell: str, until: Callable[[Ran], bool] = lambda ran: False) -> Ran:
        """Collect the output of a cell until it has finished, or until `until` returns True."""
        ran, deadline = Ran(), time.monotonic() + SECONDS_MAX
        while not until(ran):
            message = self._message(deadline)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(ran, content["name"], getattr(ran, content["name"]) + content["text"])
                case "execute_result" | "display_data":
                    ran.shown.append(content["data"].get("text/plain", ""))
                case "error":
                    ran.error, ran.error_text = content["ename"], content["evalue"]
                case "status" if content["execution_state"] == "idle":
                    return ran
        return ran

    def _message(self, deadline: float) -> dict[str, Any]:
        try:
            return dict(self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            raise TimeoutError(f"the kernel was silent for {SECONDS_MAX:g} seconds") from None

    def restart(self) -> None:
        """Restart it, like the restart button."""
        self.manager.restart_kernel(now=False)
        self.client.wait_for_ready(timeout=SECONDS_MAX)


@contextmanager
def kernel(name: str = "python3") -> Iterator[Kernel]:
    """Start a kernel of a plain specification, with ``sing`` as the default; end it afterwards."""
    manager = KernelManager(kernel_name=name, config=PATIENT)
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=SECONDS_MAX)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel()
        manager.context.destroy(linger=0)


def sessions() -> list[SessionView]:
    """Return the daemon's sessions."""
    with connect(start=False) as control:
        return control.expect(StatusReply, StatusRequest(), timeout=SECONDS_MAX).sessions


def wait_for_session(condition: Callable[[SessionView], bool]) -> SessionView:
    """Wait until the only session meets a condition; return it."""
    return wait_for_sessions(lambda found: len(found) == 1 and condition(found[0]))[0]


def wait_for_sessions(condition: Callable[[list[SessionView]], bool]) -> list[SessionView]:
    """Wait until the daemon's sessions meet a condition; return them."""
    deadline, pause = time.monotonic() + SECONDS_MAX, threading.Event()
    while True:
        found = sessions()
        if condition(found):
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {found}")
        pause.wait(0.02)
