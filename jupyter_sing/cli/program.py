"""``jupyter sing run``: a Python program in a session of its own, or its ranks in one each."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

from jupyter_sing.cli.verbs import ANSWER_SECONDS_MAX, PYTHON_HELP, AddVerb
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, NativeError, SingError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.options import DIRECT_GPU, user
from kernelproxy.common.protocol import (
    LOCAL_RANKS_MAX,
    CloseSession,
    OpenSession,
    OpenSessionReply,
    Prepare,
)
from kernelproxy.common.readable import escaped
from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.activation.child_session import DEVICE_VARIABLE, NAME_VARIABLE
from kernelproxy.kernel.activation.state import CHILDREN_VARIABLE, RANKS_VARIABLE
from kernelproxy.kernel.files import tracker
from kernelproxy.native import build as native
from kernelproxy.native import tools

#: Set by users, not by us for a process with a session.
_USERS_VARIABLES = (RANKS_VARIABLE, CHILDREN_VARIABLE)


def add_verb(add: AddVerb) -> None:
    """Add ``run``; called once, for the parser of the command line."""
    run = add("run", run_program, "run a Python program with a GPU session")
    run.add_argument("--name", help="name of the session (default: name of the script)")
    run.add_argument(
        "--device", help="id of the GPU, such as cpu:1 (default: the one with the most free memory)"
    )
    run.add_argument(
        "--direct-gpu", action="store_true", default=DIRECT_GPU.is_on(),
        help="let the program also use the GPU directly, for libraries other than torch; what it "
        "uses there is not suspended",
    )  # fmt: skip
    run.add_argument(
        "--nproc-per-node", type=_ranks, metavar="N",
        help="start N processes of the program, as torchrun does: ranks of one job, each with a "
        "session of its own, on however many GPUs there are",
    )  # fmt: skip
    run.add_argument("--python", default=sys.executable, help=PYTHON_HELP)
    run.add_argument("script", help="Python program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


def _ranks(text: str) -> int:
    """Parse a number of ranks."""
    if not text.isdecimal() or not 1 <= int(text) <= LOCAL_RANKS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {LOCAL_RANKS_MAX}")
    return int(text)


def run_program(options: argparse.Namespace) -> int:
    """``run SCRIPT``: in a session if possible, else without; return the script's exit status."""
    script = os.path.abspath(options.script)
    if not os.path.isfile(script):
        raise ControlError(f"The program {options.script} was not found.", "bad-request")
    env = _environment(options.python, options.direct_gpu)
    name = options.name or os.path.basename(script)
    program = [script, *options.arguments]
    if options.nproc_per_node:
        return _run_ranks(options, env, name, program)
    try:
        session = _open_session(options.python, name, options.device)
    except (SingError, OSError) as error:
        _explain(error, options, env)
        return _wait(subprocess.Popen([options.python, *program], env=env))
    _with_packages(env)
    env |= {"SING_SESSION": session, "SING_SOCKET": str(paths.socket_path())}
    under = [options.python, "-m", "kernelproxy.kernel.activation.run_script"]
    try:
        return _wait(subprocess.Popen([*under, *program], env=env))
    finally:
        _close_session(session)


def _run_ranks(
    options: argparse.Namespace, env: dict[str, str], name: str, program: list[str]
) -> int:
    """``run --nproc-per-node N SCRIPT``: each rank opens a session when it uses the device."""
    ranks = options.nproc_per_node
    command = [options.python, "-m", "kernelproxy.kernel.activation.jobs.run_ranks"]
    command += [str(os.getpid()), str(ranks), *program]
    _with_packages(env)
    with contextlib.ExitStack() as stack:
        try:
            native.check_version(native.find_torch(options.python))
            # While this is connected, the daemon stays, even if no rank has a session yet.
            control = stack.enter_context(connect())
            prepare = Prepare(options.python, ranks=ranks, user=user(), device=options.device)
            control.call(prepare, timeout=ANSWER_SECONDS_MAX)
        except (SingError, OSError) as error:
            _explain(error, options, env)
        else:
            env |= {"SING_SOCKET": str(paths.socket_path()), NAME_VARIABLE: name}
            if options.device:
                env[DEVICE_VARIABLE] = options.device
        return _wait(subprocess.Popen(command, env=env))


def _explain(error: Exception, options: argparse.Namespace, env: dict[str, str]) -> None:
    """Print why a program has no session, and hide the GPU from it.

    Raises
    ------
    Exception
        The error itself, if the user requested a device or may not run at all.
    """
    if options.device or (isinstance(error, ControlError) and error.reason == "not-allowed"):
        raise error
    if not options.direct_gpu:
        gpu_access.hide_in(env)
    what = "no session" if options.direct_gpu else "CPU only"
    print(f"jupyter_sing: {what}: {escaped(str(error)).rstrip('.')}.", file=sys.stderr)


def _with_packages(env: dict[str, str]) -> None:
    """Add our packages to the Python path of a program, which removes them from it again."""
    bundle = str(paths.bundle_dir())
    search = [bundle, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env |= {"PYTHONPATH": os.pathsep.join(search), "SING_BUNDLE": bundle}


def _environment(python: str, direct_gpu: bool) -> dict[str, str]:
    """Return the environment of a program without a session."""
    env = dict(os.environ)
    tracker.leave(env)
    gpu_access.restore(env)
    env = {
        name: value
        for name, value in env.items()
        if not name.startswith("SING_") or name in _USERS_VARIABLES
    }
    if direct_gpu:
        return {**env, gpu_access.DIRECT_VARIABLE: "1"}
    with contextlib.suppress(NativeError):  # the GPU is only hidden then
        library = tools.file_tracker()
        tracker.check(python, library, env)
        tracker.preload(env, library)
    return {**env, gpu_access.FILES_VARIABLE: gpu_access.FILES}


def _open_session(python: str, name: str, device: str | None) -> str:
    """Open a session for a program; an environment without a usable torch gets none."""
    native.check_version(native.find_torch(python))
    request = OpenSession(
        name=name, kernel_id="", python=python, device=device, script=True, user=user()
    )
    with connect() as control:
        session = control.expect(OpenSessionReply, request, timeout=ANSWER_SECONDS_MAX).session
        control.call(Prepare(python), timeout=ANSWER_SECONDS_MAX)
    return session


def _close_session(session: str) -> None:
    try:
        with connect(start=False) as control:
            control.call(CloseSession(session), timeout=ANSWER_SECONDS_MAX)
    except ControlError as error:
        if error.reason != "no-daemon":  # without a daemon its sessions have ended, too
            print(f"jupyter sing: {error}", file=sys.stderr)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program; return its exit status, 128 + n if signal n killed it.

    A terminal sends its signals to both processes, so this one ignores SIGINT and leaves it to the
    program. SIGTERM and SIGHUP, which may be sent to this process alone, are forwarded.
    """

    def forward(number: int, frame: Any) -> None:
        if process.poll() is None:
            process.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        signal.SIGHUP: signal.signal(signal.SIGHUP, forward),
    }
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
