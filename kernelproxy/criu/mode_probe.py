"""Kind of sandbox that works here: found by saving and restoring a small process.

There is no simpler way: whether CRIU works depends on its version, on the Linux kernel's version
and build options, and on restrictions by administrators or containers. `criu check` succeeds in
spite of all of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import get_args

from kernelproxy.common import options
from kernelproxy.common.errors import NativeError, ProcessError
from kernelproxy.common.untrusted import parse_json
from kernelproxy.criu import criu, sandbox
from kernelproxy.criu.sandbox import Form, Kind
from kernelproxy.native.tools import sandbox_program

VARIABLE = options.CRIU.variable
CACHE = "process-form.json"
#: How long a failure is cached: it may be repaired meanwhile.
REFUSAL_SECONDS = 600.0
STEP_SECONDS = 10.0

# Counts connections, and sends the count to each; the count shows that it is the same process. It
# ends by itself if the daemon that tries has died.
_TRIAL = """
import os, socket
wait, wake = os.pipe()
server = socket.create_server(("127.0.0.1", 0))
server.settimeout(60)
print(server.getsockname()[1], wake, flush=True)
for count in range(10):
    connection, _ = server.accept()
    connection.sendall(b"%d" % count)
    connection.close()
"""


def find(directory: Path, *, fresh: bool = False) -> Form:
    """Return the form that works on this machine, found by trying.

    Parameters
    ----------
    directory : Path
        Directory of the cached result, which is valid for this boot and this installation.
    fresh : bool
        Ignore a cached result.

    Raises
    ------
    ProcessError
        ``unavailable``: no form works, with the reason; ``timeout``: the trial took too long.
    """
    program = find_criu()
    try:
        key = _key(program)
    except NativeError as error:
        raise ProcessError(f"processes cannot be saved: {error}", "unavailable") from error
    file = directory / CACHE
    if not fresh and (known := _recall(file, key, program)):
        return known
    try:
        form = _try_all(program)
    except ProcessError as error:
        if error.reason == "unavailable":  # and not just slow
            until = time.time() + REFUSAL_SECONDS
            _remember(file, {"key": key, "why": str(error), "until": until})
        raise
    _remember(file, {"key": key, "kind": form.kind})
    return form


def find_criu() -> str:
    """Return the path of CRIU: from ``JUPYTER_SING_CRIU``, else found in the search path.

    Raises
    ------
    ProcessError
        ``unavailable``: there is none, or it is disabled.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        raise ProcessError(f"processes are not saved: {VARIABLE} is empty", "unavailable")
    found = shutil.which(named or "criu")
    if found is not None:
        return os.path.abspath(found)
    if named:
        raise ProcessError(
            f"processes cannot be saved: {VARIABLE} names {named}, which is no program",
            "unavailable",
        )
    raise ProcessError(
        f"processes cannot be saved: there is no criu (install CRIU 4.2, or name it in {VARIABLE})",
        "unavailable",
    )


def _key(program: str) -> str:
    """Return a key of everything that the result depends on."""
    state = os.stat(program)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    launcher = str(sandbox_program())
    parts = (boot, os.geteuid(), program, state.st_mtime_ns, state.st_size, launcher, _TRIAL)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _recall(file: Path, key: str, program: str) -> Form | None:
    try:
        known = parse_json(file.read_text("utf-8"))
        if known["key"] != key:
            return None
        if known.get("kind") in get_args(Kind):
            return Form(known["kind"], program)
        if time.time() < known["until"]:
            raise ProcessError(str(known["why"]), "unavailable")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _remember(file: Path, found: dict[str, object]) -> None:
    partial = file.with_name(f".{file.name}.{threading.get_native_id()}")
    with suppress(OSError):  # then the next call tries again
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.write_text(json.dumps(found), "utf-8")
        partial.rename(file)


# ---------------------------------------------------------------- trying


def _try_all(program: str) -> Form:
    """Return the best form that works."""
    version = _version(program)
    # Root in a container may lack privileges that it has in a user namespace of its own.
    kinds: tuple[Kind, ...] = ("root", "user") if os.geteuid() == 0 else ("user",)
    reasons, slow = [], False
    for kind in kinds:
        form = Form(kind, program)
        try:
            _try(form)
        except ProcessError as error:
            reasons.append(f"as {kind}: {error}" if len(kinds) > 1 else str(error))
            slow = slow or error.reason == "timeout"
            continue
        return form
    raise ProcessError(
        f"processes cannot be saved (CRIU {version}): {'; '.join(reasons)}",
        "timeout" if slow else "unavailable",
    )


def _version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=STEP_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ProcessError(
            f"processes cannot be saved: {program} does not start ({error})", "unavailable"
        ) from error
    return done.stdout.partition("Version:")[2].split("\n")[0].strip() or "unknown"


def _try(form: Form) -> None:
    """Save a process that listens at a port, and restore it at another port."""
    with tempfile.TemporaryDirectory(prefix="sing-trial-") as name:
        try:
            _try_in(form, Path(name))
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise ProcessError(f"a trial took too long: {error}", "timeout") from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise ProcessError(f"a trial failed: {error}", "unavailable") from error


def _try_in(form: Form, directory: Path) -> None:
    reader, writer = os.pipe()
    command = [*sandbox.prefix(form, writer), sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
            start_new_session=True,
        )
    finally:
        os.close(writer)
    with process:
        try:
            pid = sandbox.read_pid(reader, STEP_SECONDS)
            assert process.stdout is not None
            port, wake = map(int, process.stdout.readline().split())
            _expect(port, b"0")
            criu.dump(form, pid, directory, wake_fd=wake, leave_running=False, timeout=STEP_SECONDS)
            process.wait(STEP_SECONDS)
        finally:
            os.close(reader)
            process.kill()
    _try_restored(form, directory, port)


def _try_restored(form: Form, directory: Path, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        other = free.getsockname()[1]
    running = criu.restore(
        form,
        directory,
        ports={port: other},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=STEP_SECONDS,
    )
    with running.process:
        try:
            _expect(other, b"1")
        finally:
            running.process.send_signal(signal.SIGKILL)


def _expect(port: int, answer: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=STEP_SECONDS) as connection:
        found = connection.recv(len(answer) + 1)
    if found != answer:
        raise ValueError(f"a restored process said {found!r} rather than {answer!r}")
