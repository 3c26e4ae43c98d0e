"""The kernel host owns kernels, for any server, and also without one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import credentials, open_socket
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import AdoptKernel, AskKernel, Error, StartKernel
from kernelproxy.kernel_host import client, directory, retention
from kernelproxy.kernel_host.client import RemoteKernel
from kernelproxy.kernel_host.retention import Keeping
from kernelproxy.kernel_host.server_records import KernelRecord, ServerDirectory, key_of
from kernelproxy.provisioning.provisioner import SingProvisioner
from tests.doubles.waiting import wait_until
from tests.integration.conftest import lives

WAIT = "import sys, time\nprint('up', flush=True)\nwhile True: time.sleep(1)"
RECORD = KernelRecord("k", "python3", "", "", {}, "/")

Begin = Callable[..., RemoteKernel]


@pytest.fixture
def begin(runtime_dir: Path, tmp_path: Path) -> Iterator[Begin]:
    """Start a program as a kernel, which is ended after the test."""
    begun: list[RemoteKernel] = []

    def one(
        code: str = WAIT, kernel_id: str = "k", keep: float = 600, until: str = "up"
    ) -> RemoteKernel:
        request = StartKernel(
            kernel_id, [sys.executable, "-c", code], dict(os.environ), str(tmp_path), keep, "s1"
        )
        output = tmp_path / f"{kernel_id}.txt"
        with output.open("wb") as file:
            begun.append(client.start(request, [file.fileno(), file.fileno()]))
        wait_until(lambda: until in output.read_text())
        return begun[-1]

    yield one
    for each in begun:
        each.close()
    client.end_kernels()


def kernel_host_pid() -> int:
    with open_socket(directory() / "attendant.sock") as sock:
        return credentials(sock)[0]


def test_a_kernel_is_signalled_and_its_end_is_notified(begin: Begin) -> None:
    kernel = begin()
    assert (kernel.poll(), kernel.session) == (None, "s1")
    assert os.getsid(kernel.pid) == kernel.pid
    kernel.signal(signal.SIGINT)  # it is not ignored in the kernel
    wait_until(lambda: kernel.poll() is not None)
    assert kernel.poll() == -signal.SIGINT
    kernel.refresh()
    assert kernel.poll() == -signal.SIGINT
    kernel.close()
    kernel.close()


def test_an_exit_status_is_known(begin: Begin) -> None:
    kernel = begin("print('up')\nraise SystemExit(7)")
    wait_until(lambda: kernel.poll() is not None)
    assert kernel.poll() == 7


def test_a_kernel_that_was_left_is_adopted_once(begin: Begin) -> None:
    kernel = begin()
    with pytest.raises(ControlError, match="has a server"):
        client.adopt(AdoptKernel("k", 600))
    with pytest.raises(ControlError, match="runs already"):
        begin()
    kernel.leave()
    found = client.adopt(AdoptKernel("k", 600, wait=120))  # it may not have noticed yet
    assert (found.pid, found.poll()) == (kernel.pid, None)
    with pytest.raises(ControlError, match="has a server"):
        client.adopt(AdoptKernel("k", 600))
    found.close()
    assert not lives(kernel.pid)
    with pytest.raises(ControlError) as failed:
        client.adopt(AdoptKernel("k", 600))
    assert failed.value.reason == "unknown-kernel"


def test_a_kernel_without_a_server_is_ended_in_time(begin: Begin) -> None:
    kept, short = begin(), begin(kernel_id="short", keep=0.2)
    kept.leave()
    short.leave()
    wait_until(lambda: not lives(short.pid))
    assert lives(kept.pid)
    assert client.end_kernels()
    assert not lives(kept.pid)


def test_a_kernel_with_a_server_is_not_ended_by_others(begin: Begin) -> None:
    kernel = begin()
    assert client.end_kernels()
    assert kernel.poll() is None
    kernel.close()
    with pytest.raises(ControlError, match="No kernel host"):
        wait_until(lambda: client.adopt(AdoptKernel("k", 1)) if gone() else None)


def gone() -> bool:
    return not (directory() / "attendant.sock").exists()


def test_a_kernel_left_by_accident_makes_way_for_one_of_its_name(begin: Begin) -> None:
    first = begin()
    first.leave()

    def again() -> RemoteKernel | None:
        try:
            return begin()
        except ControlError:
            return None

    second = wait_until(again)
    assert second.pid != first.pid
    assert not lives(first.pid)


def test_kernels_end_with_the_kernel_host(begin: Begin) -> None:
    kernel = begin()
    os.kill(kernel_host_pid(), signal.SIGTERM)
    wait_until(lambda: kernel.poll() is not None)
    assert kernel.poll() == 1
    wait_until(lambda: not lives(kernel.pid))
    assert begin("print('up')\nraise SystemExit(0)").pid  # another kernel host


def test_a_kernel_that_cannot_start_leaves_nothing(begin: Begin, tmp_path: Path) -> None:
    request = StartKernel("x", ["/nonexistent"], {}, str(tmp_path), 600, "")
    with pytest.raises(ControlError, match="No such file"):
        client.start(request, [1, 2])
    with pytest.raises(ControlError, match="two outlets"):
        client.start(request, [])


def test_an_invalid_request_is_refused(begin: Begin) -> None:
    begin()
    with open_socket(directory() / "attendant.sock") as sock:
        send_message(sock, AskKernel())
        assert recv_message(sock)[0] == Error("AskKernel is no request.", "bad-request")
    with open_socket(directory() / "attendant.sock") as sock:
        sock.sendall(b"\xff" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "kwargs",
    [{"stdout": -1}, {"stdin": 0}, {"preexec_fn": print}, {"pass_fds": (1,)}],
    ids=lambda each: next(iter(each)),
)
def test_a_kernel_that_is_started_in_a_way_of_its_own_is_not_kept(
    runtime_dir: Path, kwargs: dict[str, Any]
) -> None:
    kept = Keeping(ServerDirectory.take(key_of("")), 600)
    with pytest.raises(ControlError) as failed:
        kept.start(RECORD, ["true"], "", kwargs, None)
    assert failed.value.reason == "unavailable"
    kept.directory.close()
    assert not kept.directory.path.exists()


def test_without_a_kernel_host_a_kernel_starts_and_the_log_shows_the_consequence(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(request: StartKernel, outlets: Any) -> RemoteKernel:
        raise ControlError("There is none.", "no-daemon")

    monkeypatch.setattr(retention, "start", start)
    manager = AsyncKernelManager(kernel_id="k")
    spec = KernelSpec(argv=[sys.executable, "-c", "pass"], language="none")
    manager._kernel_spec = spec
    one = SingProvisioner(kernel_id="k", kernel_spec=spec, parent=manager)
    manager.parent = parent = AsyncKernelManager()  # any object that supports weak references
    kept = Keeping(ServerDirectory.take(key_of("")), 600)
    retention.switch_on(parent, kept)

    async def launched() -> int | None:
        kwargs = await one.pre_launch(env=dict(os.environ))
        await one.launch_kernel(**kwargs)
        try:
            return await one.wait()
        finally:
            await one.cleanup()

    assert asyncio.run(launched()) == 0
    assert "kernel k will end with this server: There is none" in caplog.text
    assert kept.directory.records() == ([], [])
    manager.cleanup_connection_file()
    retention.switch_off(parent)
    kept.directory.close()
