"""Saving the process in a sandbox, and restoring it in a new one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelproxy.common.errors import ProcessError, ProcessReason
from kernelproxy.criu import images, sandbox
from kernelproxy.criu.dump_target import Target, clocks, locked, memory_bytes
from kernelproxy.criu.process_tree import shared_memory, tree
from kernelproxy.criu.sandbox import Form
from kernelproxy.native.tools import sandbox_program

BASE_SECONDS = 30.0
#: Speed of a slow disk.
BYTES_PER_SECOND = 30e6
END_SECONDS = 10.0
#: A process with an open database transaction has so long to finish it. Another one may begin
#: before the process is stopped: it is saved again, up to so often in all.
TRANSACTION_SECONDS = 2.0
TRANSACTION_TRIES = 3
#: Removed files that are still open are copied into the images, up to this size each.
GHOST_LIMIT = "1G"
LOG = "criu.log"
LOG_LEVEL = "-v2"
LOG_CHARS_MAX = 4000

# CRIU's errors and their user-facing meanings. The first match of the first error counts.
_MEANINGS = {
    r"Can't open mapped \[(?P<what>.*) \(deleted\)\]": "it has mapped {what}, which was removed",
    r"Can't dump ghost file (?P<what>\S+)": "it has {what} open, which was removed and is large",
    r"External socket|half of stream unix": "a Unix socket connects it to another process",
    r"io_uring": "it uses io_uring, which cannot be saved",
    r"userfaultfd": "it uses userfaultfd, which cannot be saved",
    r"Can't create link remap": "it has a file open whose name was removed",
    r"(tty|pts).*(hanging|unpaired|external)": "it has another program's terminal open",
    r"no space left on device": "the disk is full",
    r"File (?P<what>\S+) has bad size": "it has mapped {what}, whose size has changed",
    r"Can't open file (?P<what>\S+)": "it had {what} open, which cannot be opened now",
    r"Can't bind inet socket": "a port at which it listened is taken",
}


class _TransactionError(ProcessError):
    """The process is amid a transaction of databases."""

    def __init__(self, databases: Sequence[str]) -> None:
        what = ", ".join(databases)
        super().__init__(f"it is amid a transaction of the database {what}", "dump")


@dataclass
class RestoredProcess:
    """Restored process.

    Parameters
    ----------
    process : Popen
        The sandbox: a child of this process, which ends when the restored process does.
    pid : int
        Process id of the restored process, as seen here.
    """

    process: subprocess.Popen[bytes]
    pid: int


def dump(
    form: Form,
    pid: int,
    directory: Path,
    *,
    wake_fd: int,
    leave_running: bool,
    timeout: float | None = None,
) -> float:
    """Save the process in a sandbox, with all processes that it has started.

    Parameters
    ----------
    form : Form
        Form of its sandbox.
    pid : int
        Process id, as seen here.
    directory : Path
        Directory for the images, empty or missing. They contain the process's whole memory, so the
        directory is made readable only by its owner.
    wake_fd : int
        Number, in the process, of a pipe's write end, see `wake`.
    leave_running : bool
        Whether the process continues; else it has ended when this returns.
    timeout : float, optional
        Seconds; default: more than enough for its memory.

    Returns
    -------
    float
        Seconds for which the process was stopped.

    Raises
    ------
    ProcessError
        ``dump`` or ``timeout``: it cannot be saved; it continues, and the directory is empty.

    Notes
    -----
    A process amid an SQLite transaction cannot be restored. IPython's history has one after every
    cell. So this waits for the end of a transaction, and looks at the images again: a new one may
    have begun before the process was stopped.
    """
    if timeout is None:
        timeout = BASE_SECONDS + memory_bytes(pid) / BYTES_PER_SECOND
    _make_private(directory)
    try:
        with Target(pid) as target:
            _check_sharing(form, pid)
            for tries_left in reversed(range(TRANSACTION_TRIES)):
                if databases := target.wait_for_transactions(TRANSACTION_SECONDS):
                    raise _TransactionError(databases)
                # A process that is to end is only stopped until its images are complete.
                stopped = nullcontext() if leave_running else target.continued_on_failure()
                try:
                    with _emptied_on_failure(directory), stopped:
                        seconds = _save(form, target, directory, wake_fd, leave_running, timeout)
                    break
                except _TransactionError:
                    if not tries_left:
                        raise
            if not leave_running:
                target.end()
    except OSError as error:
        raise ProcessError(f"the process cannot be saved: {error}", "dump") from error
    return seconds


def _check_sharing(form: Form, pid: int) -> None:
    """Raise ProcessError if a process shares memory that CRIU cannot restore without root.

    CRIU would give the memory to one process alone, or wait for ever.
    """
    if form.kind == "user" and (name := shared_memory(tree(pid))):
        raise ProcessError(
            f"the process cannot be saved: it shares memory ({name}) with processes that it has "
            "started, and only root can save that",
            "dump",
        )


def _save(
    form: Form,
    target: Target,
    directory: Path,
    wake_fd: int,
    leave_running: bool,
    timeout: float,
) -> float:
    """Fill a directory with images; see `dump`."""
    command = [form.criu, "dump", "--tree", str(target.inner_pid), "--file-locks"]
    # CRIU would end with the sandbox if it ended the process. Links for removed names are kept
    # until the process is restored: once.
    command += ["--leave-running"] if leave_running else ["--leave-stopped", "--link-remap"]
    with _work_directory() as work:
        command += _options(form, directory, work)
        _run(sandbox.enter(form, target.pid, command), work, timeout)
        if databases := images.in_transaction(directory):
            raise _TransactionError(databases)
        mapped = images.mapped_files(directory)
        target.describe(form.kind, wake_fd, mapped).write(directory)
        return images.frozen_seconds(work)


def restore(
    form: Form,
    directory: Path,
    *,
    ports: Mapping[int, int] | None = None,
    lifeline_fd: int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    timeout: float | None = None,
) -> RestoredProcess:
    """Restore a process in a new sandbox; the saved one may run or not.

    It continues where it was saved, and waits for the line of `wake`.

    Parameters
    ----------
    form : Form
        The kind must be that of the sandbox in which the process was saved.
    directory : Path
        Directory of the images, which are not changed.
    ports : mapping, optional
        New ports for ports at which the process listened, by the old ones; see `images.prepare` for
        the others.
    lifeline_fd : int, optional
        See `sandbox.prefix`.
    stdout, stderr : file or int, optional
        Destination of its output, see `subprocess.Popen`.
    timeout : float, optional
        Seconds; default: more than enough for the size of the images.

    Raises
    ------
    ProcessError
        ``restore`` or ``timeout``: it cannot be restored; nothing of it remains.
    """
    info = images.Info.read(directory)
    if info.kind != form.kind:
        raise ProcessError(
            f"the process was saved in the form {info.kind}, and here is {form.kind}", "restore"
        )
    if timeout is None:
        size = sum(file.stat().st_size for file in directory.iterdir())
        timeout = BASE_SECONDS + size / BYTES_PER_SECOND
    with _work_directory() as work:
        (work / "images").mkdir()
        images.prepare(directory, work / "images", ports)
        command = [form.criu, "restore", "--restore-detached", "--root", "/"]
        command += _options(form, work / "images", work)
        for at, outlet in enumerate(info.outlets, start=1):
            command += ["--inherit-fd", f"fd[{at}]:{outlet}"]
        if not locked(info.locks):
            command.append("--file-locks")
        return _launch(form, info, directory, command, work, lifeline_fd, stdout, stderr, timeout)


def _launch(
    form: Form,
    info: images.Info,
    directory: Path,
    command: list[str],
    work: Path,
    lifeline_fd: int | None,
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | int | None,
    timeout: float,
) -> RestoredProcess:
    """Start the sandbox that restores the process; see `restore`."""
    reader, writer = os.pipe()
    try:
        arguments = sandbox.options(form, writer, lifeline_fd)
        arguments += ["--root"] if info.as_root else []
        arguments += ["--main-pid", str(info.pid), "--last-pid", str(images.last_pid(directory))]
        arguments += clocks(info)
        try:
            process = subprocess.Popen(
                [str(sandbox_program()), "restore", *arguments, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[writer, *([] if lifeline_fd is None else [lifeline_fd])],
                env=_environment(),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            return RestoredProcess(process, sandbox.read_pid(reader, timeout))
        except ProcessError as error:
            _end(process)
            if error.reason == "timeout":
                message = f"the process was not restored within {timeout:.0f} s"
                raise _noted(ProcessError(message, "timeout"), work) from error
            raise _failure(work, "the process cannot be restored", str(error), "restore") from error
        except BaseException:
            _end(process)
            raise
    finally:
        os.close(reader)


def listening(directory: Path) -> set[int]:
    """Return the ports at which the process listened when it was saved."""
    return images.listening(directory)


def wake(pid: int, wake_fd: Path | int, line: Mapping[str, Any]) -> None:
    """Tell a process that waits, after a dump or a restore, how to continue.

    Parameters
    ----------
    pid : int
        Process id, as seen here.
    wake_fd : int or Path
        Number given to `dump`, or directory of the images.
    line : mapping
        Sent as JSON.

    Raises
    ------
    ProcessError
        ``restore``: it does not wait for a line.
    """
    if isinstance(wake_fd, Path):
        wake_fd = images.Info.read(wake_fd).wake_fd
    try:
        # Opened through /proc: the pipe belongs to the process.
        fd = os.open(f"/proc/{pid}/fd/{wake_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, json.dumps(dict(line)).encode() + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise ProcessError(f"the process {pid} cannot be woken: {error}", "restore") from error


# ---------------------------------------------------------------- calls of CRIU


def _options(form: Form, directory: Path, work: Path) -> list[str]:
    """Return the options common to dump and restore."""
    options = ["--images-dir", str(directory), "--work-dir", str(work)]
    options += ["--log-file", LOG, LOG_LEVEL]
    # Connections cannot be restored: their owners must reconnect.
    options.append("--tcp-close")
    # Mounts and control groups are those of the sandbox in which it is restored.
    options += ["--external", "mnt[]:m", "--manage-cgroups=ignore"]
    options += ["--ghost-limit", GHOST_LIMIT, "--skip-file-rwx-check"]
    if form.kind == "user":
        options.append("--unprivileged")
    return options


@contextmanager
def _work_directory() -> Iterator[Path]:
    """Make a temporary directory, private like the images."""
    with tempfile.TemporaryDirectory(prefix="sing-process-") as name:
        yield Path(name)


def _environment() -> dict[str, str]:
    """Return our environment, without the libraries preloaded into kernels."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LD_")}


def _run(command: list[str], work: Path, timeout: float) -> None:
    """Run the dump; see `dump`."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_environment(),
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"the process could not be saved within {timeout:.0f} s"
        raise _noted(ProcessError(message, "timeout"), work) from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _failure(work, "the process cannot be saved", lines[-1] if lines else "", "dump")


def _failure(work: Path, what: str, otherwise: str, reason: ProcessReason) -> ProcessError:
    """Return the error for what CRIU has logged."""
    # CRIU probes for tun, and logs an error without it.
    errors = re.findall(r"Error \([^)]*\): (?!tun: )(.*)", _log(work))
    why = next(filter(None, map(_meaning, errors)), None) or next(iter(errors), otherwise)
    return _noted(ProcessError(f"{what}: {why}", reason), work)


def _noted(error: ProcessError, work: Path) -> ProcessError:
    """Add the end of CRIU's log to an error, for debugging."""
    error.add_note(_log(work)[-LOG_CHARS_MAX:])
    return error


def _log(work: Path) -> str:
    try:
        return (work / LOG).read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _meaning(line: str) -> str | None:
    """Return the user-facing meaning of a line in the log."""
    for pattern, meaning in _MEANINGS.items():
        if found := re.search(pattern, line, re.IGNORECASE):
            return meaning.format(**found.groupdict())
    return None


# ---------------------------------------------------------------- cleanup


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        occupied = any(directory.iterdir())
    except OSError as error:
        raise ProcessError(f"the process cannot be saved: {error}", "dump") from error
    if occupied:
        raise ProcessError(f"the process cannot be saved: {directory} is not empty", "dump")


@contextmanager
def _emptied_on_failure(directory: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for each in directory.iterdir():
            each.unlink()
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a sandbox that does not run its process yet, with all its processes."""
    process.terminate()  # it waits for its processes
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
