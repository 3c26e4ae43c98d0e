"""Kernels in sandboxes, without a daemon or a server, also as other users."""

from __future__ import annotations

import ast
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jupyter_client.blocking.client import BlockingKernelClient

from kernelproxy.criu import criu, sandbox
from kernelproxy.criu.sandbox import Form
from tests.doubles.free_ports import free_ports

SECONDS_MAX = 60.0
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")

Closable = TypeVar("Closable", "SandboxedKernel", "SandboxedProgram")

# State that only a saved process keeps, and a pipe whose end is waited for.
SETUP = """
import itertools, os, threading, time
import numpy
x = 41
counter = itertools.count()
numbers = (n for n in counter)
three = [next(numbers) for _ in range(3)]
file = open({file!r}, "w+")
_ = file.write("0123456789"), file.flush(), file.seek(4)
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.005)
thread = threading.Thread(target=tick, daemon=True)
thread.start()
lock = threading.Lock()
_ = lock.acquire()
array = numpy.arange(1_000_000)
wait, wake = os.pipe()
"""
# Advances every part of that state by one step.
STEP = """
_seen = ticks
while ticks == _seen:
    time.sleep(0.001)
x += 1
state = (x, next(numbers), file.read(2), lock.locked(), int(array.sum()))
"""
SUM = sum(range(1_000_000))


# Evaluates one expression for each connection, and returns the result.
PROGRAM = """
import fcntl, mmap, os, resource, signal, socket, sys, time
wait, wake = os.pipe()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
names = globals()
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        try:
            answer = repr(eval(connection.recv(65536).decode(), names))
        except Exception as error:
            answer = repr(error)
        connection.sendall(answer.encode())
"""


def end(process: subprocess.Popen[bytes], pid: int) -> None:
    """Kill a sandbox, and wait until its process has ended, which frees its resources."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        fd = -1  # gone already
    process.kill()
    process.wait()
    if fd >= 0:
        gone = select.select([fd], [], [], SECONDS_MAX)[0]
        os.close(fd)
        assert gone, "the process outlives its sandbox"


@dataclass
class SandboxedProgram:
    """A small program in a sandbox."""

    process: subprocess.Popen[bytes]
    pid: int
    port: int

    def ask(self, expression: str) -> Any:
        """Let it evaluate an expression; return the value."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS_MAX) as connection:
            connection.sendall(expression.encode())
            answer = b""
            while data := connection.recv(65536):
                answer += data
        return ast.literal_eval(answer.decode())

    def close(self) -> None:
        """Kill it."""
        end(self.process, self.pid)
        if self.process.stdout is not None:
            self.process.stdout.close()


def launch(
    command: list[str],
    form: Form,
    *,
    lifeline_fd: int | None = None,
    stdout: int = subprocess.DEVNULL,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Run a command in a sandbox; return the sandbox's process and the command's pid."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [*sandbox.prefix(form, writer, lifeline_fd), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer, *([] if lifeline_fd is None else [lifeline_fd])],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        os.close(writer)
    try:
        return process, sandbox.read_pid(reader, SECONDS_MAX)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(reader)


def start_program(form: Form, **options: Any) -> SandboxedProgram:
    """Start a program that answers."""
    (port,) = free_ports(1)
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(port)]
    process, pid = launch(command, form, stdout=subprocess.PIPE, **options)
    program = SandboxedProgram(process, pid, port)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return program


def restore_program(form: Form, images: Path, **options: Any) -> SandboxedProgram:
    """Restore it, with another port."""
    (old,), (new,) = criu.listening(images), free_ports(1)
    running = criu.restore(form, images, ports={old: new}, stdout=subprocess.PIPE, **options)
    return SandboxedProgram(running.process, running.pid, new)


@dataclass
class SandboxedKernel:
    """A kernel's process and a client of it."""

    process: subprocess.Popen[bytes]
    pid: int
    client: BlockingKernelClient

    def run(self, code: str, expression: str = "None") -> Any:
        """Run a cell; return the value of an expression of literals after it."""
        return self.finish(self.begin(code, expression))

    def begin(self, code: str, expression: str = "None") -> str:
        """Start a cell."""
        asked = {"value": f"__import__('json').dumps({expression})"}
        # Otherwise requests that are queued behind an error are not executed.
        return str(
            self.client.execute(
                code, store_history=False, user_expressions=asked, stop_on_error=False
            )
        )

    def reply(self, cell: str) -> dict[str, Any]:
        """Wait for the reply to a cell.

        Nothing is read from iopub: a client that has just connected may miss what comes there.
        """
        while True:
            message = self.client.get_shell_msg(timeout=SECONDS_MAX)
            if message["parent_header"].get("msg_id") == cell:
                return dict(message["content"])

    def finish(self, cell: str) -> Any:
        """Wait for a cell that succeeds; return its expression's value."""
        content = self.reply(cell)
        assert content["status"] == "ok", content
        value = content["user_expressions"]["value"]
        assert value["status"] == "ok", value
        return json.loads(eval(value["data"]["text/plain"]))

    def close(self) -> None:
        """Kill it."""
        self.client.stop_channels()
        self.client.context.destroy(linger=0)
        end(self.process, self.pid)


def connection(ports: list[int]) -> dict[str, Any]:
    """Return the content of a connection file."""
    found: dict[str, Any] = {
        f"{name}_port": port for name, port in zip(CHANNELS, ports, strict=True)
    }
    return {
        **found, "ip": "127.0.0.1", "transport": "tcp", "key": "secret",
        "signature_scheme": "hmac-sha256", "kernel_name": "",
    }  # fmt: skip


def connect(info: dict[str, Any]) -> BlockingKernelClient:
    """Return a client for requests and replies, without iopub, stdin and heartbeats."""
    client = BlockingKernelClient()
    encoded: Any = {**info, "key": info["key"].encode()}
    client.load_connection_info(encoded)
    client.start_channels(shell=True, iopub=False, stdin=False, hb=False, control=False)
    return client


def start(form: Form, directory: Path) -> SandboxedKernel:
    """Start a kernel in a sandbox that ends with this process."""
    info = connection(free_ports(len(CHANNELS)))
    file = directory / "connection.json"
    file.write_text(json.dumps(info))
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(file)]
    command.append("--HistoryManager.enabled=False")
    process, pid = launch(command, form, cwd=directory)
    return SandboxedKernel(process, pid, connect(info))


def restore(form: Form, images: Path, *, ports: dict[int, int] | None = None) -> SandboxedKernel:
    """Restore a kernel of `start` from the directory that contains `images`."""
    info = json.loads((images.parent / "connection.json").read_text())
    running = criu.restore(form, images, ports=ports, stderr=subprocess.DEVNULL)
    for name in CHANNELS:
        port = info[f"{name}_port"]
        info[f"{name}_port"] = (ports or {}).get(port, port)
    return SandboxedKernel(running.process, running.pid, connect(info))


@contextmanager
def closing(each: Closable) -> Iterator[Closable]:
    """Kill a kernel or a program at the end."""
    try:
        yield each
    finally:
        each.close()
