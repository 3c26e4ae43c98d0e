"""Fixtures that all tests share: an isolated daemon, and checks for leaked processes and files."""

from __future__ import annotations

import functools
import gc
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Stop
from kernelproxy.kernel_host import client

ROOT = Path(__file__).resolve().parents[1]
END_SECONDS = 120.0

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]

#: Files that take longest start first, so that no core waits for one of them at the end.
LONGEST = (
    "test_conformance.py",
    "test_bench.py",
    "test_deaths.py",
    "test_reattach.py",
    "test_compile.py",
    "test_recovery.py",
    "test_system_daemon.py",
    "test_libraries.py",
    "test_checkpoints.py",
    "test_process.py",
    "test_saved_jobs.py",
)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by file: the longest, then in the order of the folders.

    Tests that start a daemon are slow: that takes most of a second.
    """
    for item in items:
        if "toy_host" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    order = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's daemon, settings and checkpoints out of every test."""
    # Tests that run in the background of a shell inherit that SIGINT is ignored; so would all
    # processes that they start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    base = tmp_path_factory.mktemp("sing")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name == "JUPYTER_SING_CRIU":
                continue  # what is tested with, and no setting
            ours = ("SING_", "JUPYTER_SING_", "JUPYTER_DEFAULT_PROVISIONER", "JUPYTERHUB_USER")
            if name.startswith(ours):
                patch.delenv(name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(base / name.lower()))
        # Kernels get a device where a test asks for one.
        patch.setenv("JUPYTER_SING_HEADLESS", "0")
        # Warnings are errors in this process only, not in kernels or servers.
        patch.delenv("PYTHONWARNINGS", raising=False)
        with daemon_directory(base / "runtime", patch):
            yield


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test alone; a daemon in it is stopped at the end."""
    with daemon_directory(tmp_path / "runtime", monkeypatch) as directory:
        yield directory


@contextmanager
def daemon_directory(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a runtime directory in the environment; at the end, stop its daemon.

    Fails the test if a process of that daemon outlives it.
    """
    directory.mkdir(mode=0o700)
    patch.setenv("JUPYTER_SING_RUNTIME_DIR", str(directory))
    patch.setenv("JUPYTER_SING_DATA_DIR", str(directory / "data"))
    try:
        yield directory
    finally:
        patch.setenv("JUPYTER_SING_RUNTIME_DIR", str(directory))
        stop_daemon(directory)


def stop_daemon(directory: Path) -> None:
    """Stop the daemon of a runtime directory, and fail if one of its processes stays.

    `JUPYTER_SING_RUNTIME_DIR` must name the directory.
    """
    try:
        with agent_client.connect(start=False) as connection:
            connection.call(Stop(), timeout=END_SECONDS)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        client.end_kernels()
    deadline = time.monotonic() + END_SECONDS
    left = []
    for pid, command in processes_in(directory).items():
        if not _wait_for_end(pid, deadline):
            left.append(f"{pid}: {command}")
            os.kill(pid, signal.SIGKILL)
    if left:
        log = directory / "agent.log"
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        pytest.fail("processes outlived their daemon:\n" + "\n".join(left) + "\n" + tail)


def processes_in(directory: Path) -> dict[int, str]:
    """Return the processes, by pid, that were started for a runtime directory."""
    wanted = f"JUPYTER_SING_RUNTIME_DIR={directory}".encode()
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(path.name)] = command.decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile, or belongs to another user
    return found


def _wait_for_end(pid: int, deadline: float) -> bool:
    """Wait until a process has ended; return False if it still runs at the deadline."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        seconds = max(0.0, deadline - time.monotonic())
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def _provisioners_anew() -> None:
    """Let the variable that names the default provisioner be read again."""
    KernelProvisionerFactory.clear_instance()


@pytest.fixture(autouse=True)
def _nothing_left_behind(_isolated: None) -> Iterator[None]:
    """Fail a test after which this process has more children or memfds than before."""
    before = _held()
    yield
    deadline = time.monotonic() + END_SECONDS
    while left := _held() - before:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        time.sleep(0.01)  # a thread may be about to close it


def _held() -> set[str]:
    """Return the children, and the open or mapped memfds, of this process."""
    held = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            held |= {f"process {pid}" for pid in (task / "children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor with which the directory was listed
        if target.startswith("/memfd:"):
            held.add(f"descriptor {name} ({target})")
    maps = Path("/proc/self/maps").read_text()
    return held | set(re.findall(r"^(\S+) .*/memfd:sing", maps, re.MULTILINE))


@pytest.fixture
def jp_fetch(jp_fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Fixture of `pytest_jupyter`, with a timeout that is long enough for a loaded machine."""
    return functools.partial(jp_fetch, request_timeout=END_SECONDS)


@pytest.fixture(scope="session")
def run_program() -> RunProgram:
    """Return a function that runs a Python program, plainly or under a device session.

    The function takes the program's path and arguments, `proxied`, and `env`, variables added
    to the environment. It returns the output. If the program fails, the test fails with
    its output.
    """

    def run(
        program: Path, *arguments: str, proxied: bool, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        under = ["-m", "jupyter_sing.cli", "run"] if proxied else []
        done = subprocess.run(
            [sys.executable, *under, str(program), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.fail(f"{program.name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return done

    return run
