"""Ports of a kernel are reserved from their choice until its end."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from kernelproxy.provisioning import ports
from kernelproxy.provisioning.launcher import KeptKernel
from kernelproxy.zmq_proxy.connection import CHANNELS


@pytest.fixture
def kernel() -> Iterator[KeptKernel]:
    """Return a provisioner whose kernel is not started."""
    manager = AsyncKernelManager(kernel_id="k")
    spec = manager._kernel_spec = KernelSpec(argv=[sys.executable, "-c", "", "{connection_file}"])
    one = KeptKernel(kernel_id="k", kernel_spec=spec, parent=manager)
    yield one
    asyncio.run(one.cleanup())
    manager.cleanup_connection_file()


def prepare(kernel: KeptKernel) -> list[int]:
    """Prepare a launch; return the ports in the kernel's connection file."""
    asyncio.run(kernel.pre_launch(env={}))
    info: dict[str, Any] = {**kernel.connection_info}
    found = [int(info[f"{channel}_port"]) for channel in CHANNELS]
    assert len(set(found)) == len(CHANNELS)
    return found


def is_free(kernel: KeptKernel, port: int) -> bool:
    """True if another process could choose the port."""
    assert kernel.parent is not None
    with socket.socket() as sock:
        try:
            sock.bind((kernel.parent.ip, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def test_only_the_kernel_gets_its_ports(kernel: KeptKernel) -> None:
    old = prepare(kernel)
    assert not any(is_free(kernel, port) for port in old)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as shell:
        assert kernel.parent is not None
        shell.bind(f"tcp://{kernel.parent.ip}:{old[0]}")


def test_ports_stay_reserved_at_a_restart(kernel: KeptKernel) -> None:
    old = prepare(kernel)
    asyncio.run(kernel.cleanup(restart=True))
    assert not any(is_free(kernel, port) for port in old)
    assert prepare(kernel) == old


def test_a_restart_with_new_ports_reserves_these(kernel: KeptKernel) -> None:
    old = prepare(kernel)
    assert kernel.parent is not None
    kernel.parent.cleanup_random_ports()
    asyncio.run(kernel.cleanup(restart=True))
    new = prepare(kernel)
    assert not any(is_free(kernel, port) for port in new)
    assert all(is_free(kernel, port) for port in set(old) - set(new))


def test_ports_are_released_when_the_kernel_has_ended(kernel: KeptKernel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    old = prepare(kernel)
    assert len(os.listdir("/proc/self/fd")) >= before + len(CHANNELS)
    asyncio.run(kernel.cleanup())
    assert all(is_free(kernel, port) for port in old)


def test_a_launch_continues_if_ports_cannot_be_reserved(
    kernel: KeptKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ports, "socket", SimpleNamespace(**{**vars(socket), "socket": fail}))
    assert all(is_free(kernel, port) for port in prepare(kernel))  # Jupyter has chosen them
    assert "the ports of kernel k are not reserved: [Errno 24]" in caplog.text


def test_ports_of_a_dropped_provisioner_are_released(kernel: KeptKernel) -> None:
    manager = kernel.parent
    assert manager is not None
    one = KeptKernel(kernel_id="k", kernel_spec=kernel.kernel_spec, parent=manager)
    old = prepare(one)
    del one
    gc.collect()
    assert all(is_free(kernel, port) for port in old)
