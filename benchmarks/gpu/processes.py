"""Shared parts of the GPU suite's steps: time limits, directories, and processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.options import HOST_MEMORY
from kernelproxy.common.protocol import Stop

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).with_name("side.py")
END_SECONDS = 20.0


class FailedError(Exception):
    """A step did not give the expected result; the text says what is wrong.

    Parameters
    ----------
    text : str
    table : list of str
        Its results so far, as a Markdown table.
    figures : object
        The same as JSON.
    """

    def __init__(self, text: str, table: Sequence[str] = (), figures: Any = None) -> None:
        super().__init__(text)
        self.table, self.figures = list(table), figures


class LateError(FailedError):
    """A step had time for a part of its results; what it has is right."""


class SkippedError(Exception):
    """A step cannot be run here; the text says why."""


class Suite:
    """State that the steps share.

    Parameters
    ----------
    device : str
        Device of the workers: ``cuda:0``, or ``cpu`` for a software device.
    small : bool
        Tiny models and states.
    out : Path
        Directory for the results.
    seconds : float
        Time limit of the whole suite.
    scale : float
        Factor on the steps' time limits.
    """

    def __init__(
        self, device: str, small: bool, out: Path, seconds: float, scale: float = 1.0
    ) -> None:
        self.gpu, self.small, self.out = device.startswith("cuda"), small, out
        self.device, self.scale = device, scale
        self.deadline = time.monotonic() + seconds
        self.step = ""
        self.limit = self.deadline
        self.scratch = Path(tempfile.mkdtemp(prefix="sing-gpu-"))
        #: What the steps print, and the daemons' logs: packed into one file of `out`.
        self.logs = self.scratch / "logs"
        self.logs.mkdir()
        self._metadata = self.scratch / "metadata"
        write_entry_points(self._metadata)
        self.transformers = has_module("transformers")

    def pack(self) -> None:
        """Pack the logs so far into one file."""
        with tarfile.open(self.out / "gpu_suite_logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")

    @property
    def plain(self) -> str:
        """Name in plain torch of the device with which the proxied one is compared."""
        return "cuda" if self.gpu else "cpu"

    def devices(self, limit: str = "") -> str:
        """Return the device in the format of `JUPYTER_SING_DEVICES`, with a memory limit."""
        if self.gpu:
            return f"{self.device}:{limit}" if limit else self.device
        return f"cpu:{limit or '4GiB'}@1"

    def environment(self, **variables: str) -> dict[str, str]:
        """Return a step's environment; a software device has one thread, like plain torch."""
        kept = {
            name: value
            for name, value in os.environ.items()
            # MemTotal of a virtual machine may grow later: then the user says what there is.
            if not name.startswith(("SING_", "JUPYTER_SING_")) or name == HOST_MEMORY.variable
        }
        threads = {} if self.gpu else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = os.pathsep.join((str(ROOT), str(self._metadata)))
        return {**kept, "PYTHONPATH": path, **threads, **variables}

    def run(self, *command: str | Path, env: dict[str, str] | None = None, label: str = "") -> str:
        """Run a command within the step's time and return its output.

        Raises
        ------
        FailedError
            Its exit status is not 0, or it took too long.
        """
        done = self.complete(command, env or self.environment(), self.limit)
        name = f"{self.step}{'-' + label if label else ''}".replace(" ", "-")
        (self.logs / f"{name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise FailedError(
                f"{_brief(command)} ended with {done.returncode}: {tail_of(done.stderr)}"
            )
        return done.stdout

    def complete(
        self, command: Sequence[str | Path], env: dict[str, str], limit: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until `limit`, then end it and all processes that it has started."""
        with subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=max(1.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                raise TimeoutError(f"{_brief(command)} was ended: {tail_of(out + err)}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextmanager
    def daemon(self, devices: str, **variables: str) -> Iterator[dict[str, str]]:
        """Set a directory for a separate daemon, and stop that daemon at the end."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            directory = Path(name)
            env = self.environment(
                JUPYTER_SING_RUNTIME_DIR=str(directory),
                JUPYTER_SING_DATA_DIR=str(directory / "data"),
                JUPYTER_SING_DEVICES=devices,
                **variables,
            )
            # Also for this process's own requests to the daemon.
            before = dict(os.environ)
            os.environ.update(env)
            try:
                yield env
            finally:
                try:
                    _stop_daemon()
                    log = directory / "agent.log"
                    if log.exists():
                        text = log.read_text(errors="replace")
                        with open(self.logs / "daemons.log", "a", encoding="utf-8") as file:
                            file.write(f"==== {self.step}\n{text}")
                finally:
                    os.environ.clear()
                    os.environ.update(before)

    def proxied(self, program: str | Path, *arguments: str) -> tuple[str | Path, ...]:
        """Return the command of a program under a session."""
        return (sys.executable, "-m", "jupyter_sing.cli", "run", program, *arguments)

    @contextmanager
    def side(
        self, env: dict[str, str], *, proxied: bool, name: str = "suite"
    ) -> Iterator[GpuProcessSide]:
        """Start one side of a paired measurement; `name` is that of its session."""
        options = ["--small"] if self.small else []
        if proxied:
            run = (sys.executable, "-m", "jupyter_sing.cli", "run", "--name", name)
            command = [*run, str(SIDE), "--device", "cuda", *options]
        else:
            command = [sys.executable, str(SIDE), "--device", self.plain, *options]
        file = f"{self.step}-{name if proxied else 'plain'}.err".replace(" ", "-")
        with open(self.logs / file, "a", encoding="utf-8") as errors:
            side = GpuProcessSide(command, env, errors, self)
            try:
                yield side
            finally:
                side.close()


class GpuProcessSide:
    """A process that executes orders."""

    def __init__(
        self, command: Sequence[str], env: dict[str, str], errors: IO[str], suite: Suite
    ) -> None:
        self._suite, self._errors = suite, errors
        self._process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, start_new_session=True,
        )  # fmt: skip
        # A process that hangs is ended, which ends the wait for its answer.
        self._overdue = threading.Timer(max(1.0, suite.limit - time.monotonic()), self._kill)
        self._overdue.daemon = True
        self._overdue.start()

    def order(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and return the answer.

        Raises
        ------
        FailedError
            The process ended instead of answering.
        """
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("{"):  # libraries print, too
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        except BrokenPipeError:
            pass
        status = self._process.wait()
        said = tail_of(Path(self._errors.name).read_text(errors="replace"))
        if time.monotonic() >= self._suite.limit:
            raise TimeoutError(f"the order {do} took too long")
        raise FailedError(f"the order {do} {arguments} ended a side with {status}: {said}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._overdue.cancel()
        try:
            self._process.stdin.close()
            # The other side of a pair may have taken all of the step's time.
            left = self._suite.limit - time.monotonic()
            self._process.wait(min(END_SECONDS, max(1.0, left)))
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._kill()
            self._process.wait()
        self._process.stdout.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)


def tail_of(text: str, lines: int = 4) -> str:
    """Return the last lines of a text, joined into one."""
    return " / ".join(text.strip().splitlines()[-lines:])[-600:]


def write_entry_points(directory: Path) -> None:
    """Write the project's entry points where Python finds them, as it need not be installed.

    Without them a daemon has no scheduler.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    info = directory / f"{project['name']}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines: list[str] = []
    for group, found in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in found.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _brief(command: Sequence[str | Path]) -> str:
    return " ".join(Path(str(word)).name for word in command[:6])


def has_module(name: str) -> bool:
    """Return whether this interpreter finds a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _stop_daemon() -> None:
    try:
        with agent_client.connect(start=False) as connection:
            connection.call(Stop(), timeout=END_SECONDS)
    except agent_client.ControlError as error:
        if error.reason != "no-daemon":
            raise
