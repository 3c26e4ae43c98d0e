"""``jupyter sing``: device sessions on the command line.

Exit status 0, or 1 and one line on stderr, or 2 for usage. With ``--json`` a verb prints one JSON
object, also when it fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from jupyter_sing import queries
from jupyter_sing.cli import activity, doctor, policy, simulate
from jupyter_sing.cli.output import until_nobody_reads
from jupyter_sing.cli.progress import Line
from jupyter_sing.cli.wait_lines import WaitLines
from jupyter_sing.controller import decision_log
from jupyter_sing.notebook import status_text
from jupyter_sing.notebook.checkpoint_outcome import Outcome
from kernelproxy.common import environment, paths, restart_note
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.agent_client import Control, connect, start_detached
from kernelproxy.common.protocol import (
    FORMS,
    Checkpoint,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    CloseSession,
    DeleteCheckpoint,
    LastCheckpoint,
    MigrateRequest,
    OpenSession,
    OpenSessionReply,
    Pin,
    Prepare,
    Restore,
    RestoreReply,
    Resume,
    SessionReply,
    SetPriority,
    StatusReply,
    StatusRequest,
    Stop,
    StopReply,
    Suspend,
    Why,
    WhyReply,
)
from kernelproxy.common.readable import escaped, quoted
from kernelproxy.common.scheduler_api import TIERS
from kernelproxy.common.system_mode import system_place
from kernelproxy.kernel_host import client
from kernelproxy.native import build as native
from kernelproxy.native import libraries

ANSWER_SECONDS_MAX = 30.0
#: Spans of a session in a user-facing table: the shown time divided by this is the resolution.
_SPANS_SHOWN = 200
_SESSION = "id of the session, a unique prefix of the id, or the name"
_PYTHON = "Python interpreter that has torch (default: this one)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status; the entry point of ``jupyter-sing``."""
    options = _parser().parse_args(arguments)
    with until_nobody_reads():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Run a verb; report its exceptions as one line."""
    verb: Callable[[argparse.Namespace], int] = options.function
    try:
        with restart_note.told(lambda text: print(text, file=sys.stderr, flush=True)):
            return verb(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (SingError, OSError) as error:
        reason = error.reason if isinstance(error, ControlError) else "failed"
        text = _text(error)
        if options.json:
            _print_json({"message": text, "reason": reason})
        else:
            print(f"jupyter sing: {escaped(text)}", file=sys.stderr)
        return 1


def _text(error: Exception) -> str:
    """Return an error's message; for an OS error with a file, the file's name and no errno."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    return str(error)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser = argparse.ArgumentParser(
        prog="jupyter sing",
        description="Manage GPU sessions of notebooks and programs, and their checkpoints.",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> Any:
        verb = verbs.add_parser(name, parents=[common], help=text, description=text)
        verb.set_defaults(function=function)
        return verb

    add("status", status, "show GPUs and sessions")
    add("devices", devices, "show GPUs")
    had = add("activity", show_activity, "show which sessions used the GPUs, and their events")
    until_now = "number of hours to show (default: 24; older records are deleted)"
    had.add_argument("--hours", type=_hours, default=24.0, help=until_now)
    run = add("run", run_program, "run a Python program with a GPU session")
    run.add_argument("--name", help="name of the session (default: name of the script)")
    run.add_argument(
        "--device", help="id of the GPU, such as cpu:1 (default: the one with the most free memory)"
    )
    run.add_argument("--python", default=sys.executable, help=_PYTHON)
    run.add_argument("script", help="Python program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    suspend_parser = add("suspend", suspend, "free the GPU of a session and keep its state")
    resume_parser = add("resume", resume, "move the state of a session back to the GPU")
    for each in (suspend_parser, resume_parser):
        each.add_argument("session", help=_SESSION)
    move = add("migrate", migrate, "move a session to another GPU while it runs")
    move.add_argument("session", help=_SESSION)
    move.add_argument("device", help="id of the GPU, such as cpu:1 or cuda:0")
    pin_parser = add("pin", pin, "keep the memory of a session on its GPU")
    unpin_parser = add("unpin", pin, "allow the memory of a session to leave its GPU again")
    priority_parser = add("priority", priority, "show or set the priority of a session")
    for each in (pin_parser, unpin_parser, priority_parser):
        each.add_argument("session", help=_SESSION)
    pin_parser.set_defaults(pinned=True)
    unpin_parser.set_defaults(pinned=False)
    levels = "priority to set, as far as the policy allows (default: show the current one)"
    priority_parser.add_argument("level", nargs="?", choices=TIERS, help=levels)
    explain = add("why", why, "show the scheduler's decisions about a session, with reasons")
    explain.add_argument("session", help=f"{_SESSION}; ended sessions are found, too")
    explain.add_argument(
        "--count", type=int, default=20, help="number of decisions to show (default: 20)"
    )
    form = "namespace: only variables; process: the whole process (default: process if possible)"
    checkpoint_parser = add("checkpoint", checkpoint, "save a checkpoint of a notebook")
    checkpoint_parser.add_argument("session", help=_SESSION)
    named = checkpoint_parser.add_mutually_exclusive_group()
    named.add_argument(
        "called",
        nargs="?",
        metavar="NAME",
        help="name of the checkpoint (default: notebook and time)",
    )
    named.add_argument("--name", help="same as NAME")
    checkpoint_parser.add_argument("--form", choices=FORMS, default="", help=form)
    add("checkpoints", checkpoints, "list checkpoints")
    restore_parser = add(
        "restore",
        restore,
        "restore a checkpoint into the kernel that it was saved from, or into another one",
    )
    which = restore_parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="name of the checkpoint")
    which.add_argument(
        "--last",
        nargs="?",
        const="",
        metavar="SESSION",
        help="restore the last checkpoint of a session's notebook into its kernel (default: the "
        "only session that has a checkpoint)",
    )
    restore_parser.add_argument(
        "--session", help="session to restore into (default: the one that was saved)"
    )
    restore_parser.add_argument("--form", choices=FORMS, default="", help=form)
    delete = add("checkpoint-delete", checkpoint_delete, "delete a checkpoint")
    delete.add_argument("name", help="name of the checkpoint")
    policy.add_verbs(verbs, common)
    simulate.add_verb(verbs, common)
    doctor_parser = add("doctor", show_doctor, "check what works on this machine")
    doctor_parser.add_argument("--python", default=sys.executable, help=_PYTHON)
    build_parser = add(
        "build", build, "compile GPU support once, for all users of this machine (as root)"
    )
    build_parser.add_argument("--python", default=sys.executable, help=_PYTHON)
    daemon_parser = add("daemon", daemon, "start the daemon (it also starts by itself when needed)")
    daemon_parser.add_argument("--foreground", action="store_true", help="run in this terminal")
    daemon_parser.add_argument(
        "--system",
        action="store_true",
        help="start the daemon that serves all users of this machine (as root)",
    )
    daemon_parser.add_argument(
        "--group", help="with --system: only members of this group may use the daemon"
    )
    stop_parser = add("stop", stop, "save all notebooks, then stop the daemon and all sessions")
    stop_parser.add_argument(
        "--no-checkpoint",
        action="store_true",
        help="do not save first: GPU memory that is in no checkpoint is lost",
    )
    return parser


def status(options: argparse.Namespace) -> int:
    """``status``: without a daemon both lists are empty; starts no daemon."""
    found = _status()
    if options.json:
        _print_json(
            {
                name: each
                for name, each in asdict(found).items()
                if each or name not in ("sharing", "elsewhere")
            }
        )
    elif not found.devices:
        print("The daemon is not running. It starts with the first notebook or program.")
    else:
        print(status_text.devices_table(found.devices))
        _print_elsewhere(found)
        print()
        print(status_text.sessions_table(found.sessions) if found.sessions else "No sessions.")
        if waited := status_text.waits_line(found.sharing):
            print(f"\n{waited}")
    return 0


def devices(options: argparse.Namespace) -> int:
    """``devices``: like `status`, without the sessions."""
    found = _status()
    if options.json:
        _print_json({"devices": found.devices})
    elif not found.devices:
        print("The daemon is not running. It starts with the first notebook or program.")
    else:
        print(status_text.devices_table(found.devices))
        _print_elsewhere(found)
    return 0


def _print_elsewhere(found: StatusReply) -> None:
    """Print which GPUs are used by another daemon."""
    if found.elsewhere:
        print("\n" + "\n".join(found.elsewhere))


def show_activity(options: argparse.Namespace) -> int:
    """``activity``: includes the time before the daemon started; works without a daemon."""
    seconds = 3600.0 * options.hours
    resolution = 1.0 if options.json else seconds / _SPANS_SHOWN
    found = queries.activity_since(max(0.0, time.time() - seconds), resolution)
    if options.json:
        _print_json(found)
    else:
        print("\n".join(activity.lines(found)))
    return 0


def _hours(text: str) -> float:
    """Parse a number of hours."""
    hours = float(text)
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of hours above 0")
    return hours


def suspend(options: argparse.Namespace) -> int:
    """``suspend S``: return when the device is free."""
    request = Suspend(options.session, "Suspended by jupyter sing suspend")
    with connect(start=False) as control:
        return _show_session(options, control.expect(SessionReply, request))


def resume(options: argparse.Namespace) -> int:
    """``resume S``: return when the session is on its device."""
    waiting = WaitLines(options.session, wanted=not options.json)
    with connect(start=False) as control, waiting:
        reply = control.expect(SessionReply, Resume(options.session))
    return _show_session(options, reply)


def migrate(options: argparse.Namespace) -> int:
    """``migrate S DEVICE``: return when the session is on that device."""
    request = MigrateRequest(options.session, options.device)
    waiting = WaitLines(options.session, wanted=not options.json)
    with connect(start=False) as control, waiting:
        reply = control.expect(SessionReply, request)
    if options.json:
        _print_json(reply.session)
    else:
        print(f"{reply.session['name']}: {status_text.migration_text(reply.session)}")
    return 0


def pin(options: argparse.Namespace) -> int:
    """``pin S`` and ``unpin S``: idempotent."""
    with connect(start=False) as control:
        reply = control.expect(SessionReply, Pin(options.session, options.pinned))
    return _show(options, reply.session, status_text.pinned_text(reply.session))


def priority(options: argparse.Namespace) -> int:
    """``priority S LEVEL``, and ``priority S``, which shows it."""
    with connect(start=False) as control:
        if options.level:
            request = SetPriority(options.session, options.level)
            session = control.expect(SessionReply, request).session
        else:
            session = _session(control, options.session)
    return _show(options, session, status_text.priority_text(session))


def _session(control: Control, name: str) -> dict[str, Any]:
    """Find a session as the daemon does: by id, unique prefix, or name."""
    sessions = control.expect(StatusReply, StatusRequest()).sessions
    found = [each for each in sessions if each["id"] == name]
    found = found or [each for each in sessions if each["id"].startswith(name)]
    found = found or [each for each in sessions if each["name"] == name]
    if not found:
        raise ControlError(f"There is no session {quoted(name)}.", "unknown-session")
    if len(found) > 1:
        ids = ", ".join(each["id"] for each in found)
        raise ControlError(f"Several sessions match {quoted(name)}: {ids}.", "ambiguous")
    return dict(found[0])


def checkpoint(options: argparse.Namespace) -> int:
    """``checkpoint S``: wait for a running cell; return when it is safe on disk."""
    outcome = Outcome(options.session)
    with connect(start=False) as control, Line("Saving", wanted=not options.json) as line:
        name = options.name or options.called or ""
        request = Checkpoint(options.session, name, form=options.form)
        with WaitLines(options.session, wanted=not options.json):
            try:
                made = control.expect(CheckpointReply, request, show=line.show_bytes).checkpoint
            except ControlError as error:
                made = outcome.after(error)
    if options.json:
        _print_json(made)
        return 0
    print("\n".join(status_text.checkpoint_made_lines(made)))
    return 0


def checkpoints(options: argparse.Namespace) -> int:
    """``checkpoints``: list them, newest first."""
    with connect() as control:
        found = control.expect(CheckpointsReply, CheckpointsRequest()).checkpoints
    if options.json:
        _print_json({"checkpoints": found})
    else:
        print(status_text.checkpoints_table(found) if found else "No checkpoints.")
    return 0


def restore(options: argparse.Namespace) -> int:
    """``restore NAME``: wait for a running cell; return when the notebook is restored."""
    with connect() as control, Line("Restoring", wanted=not options.json) as line:
        if options.last is None:
            name = options.name
            session = options.session or _session_of(control, name)
        else:
            session = options.last or options.session or _only_session(control)
            name = control.expect(CheckpointReply, LastCheckpoint(session)).checkpoint["name"]
        request = Restore(session, name, options.form)
        with WaitLines(session, wanted=not options.json):
            outcome = control.expect(RestoreReply, request, show=line.show_bytes).outcome
    if options.json:
        _print_json(outcome)
        return 0
    print("\n".join(status_text.restored_lines(outcome)))
    return 0


def _session_of(control: Control, name: str) -> str:
    """Find the session of the kernel from which a checkpoint was made."""
    found = control.expect(CheckpointsReply, CheckpointsRequest()).checkpoints
    made = next((each for each in found if each["name"] == name), None)
    if made is None:
        raise ControlError(f"There is no checkpoint {quoted(name)}.", "unknown-checkpoint")
    if "problem" in made:
        raise ControlError(made["problem"], "damaged")
    for session in control.expect(StatusReply, StatusRequest()).sessions:
        if made["kernel_id"] and session["kernel_id"] == made["kernel_id"]:
            return str(session["id"])
    raise ControlError(
        f"The session of {name} has ended. Open its notebook, restart the kernel if it still runs, "
        f"and run %sing restore {name} there. Or choose another session with --session.",
        "unknown-session",
    )


def _only_session(control: Control) -> str:
    """Find the one session whose notebook has a checkpoint."""
    found = [
        each
        for each in control.expect(StatusReply, StatusRequest()).sessions
        if each["last_checkpoint"] is not None
    ]
    if len(found) == 1:
        return str(found[0]["id"])
    if not found:
        raise ControlError(
            "No session has a checkpoint. To restore one of an ended session, find its name with "
            "jupyter sing checkpoints, and run %sing restore NAME in a notebook.",
            "unknown-checkpoint",
        )
    names = ", ".join(f"{each['id'][:8]} ({each['name']})" for each in found)
    raise ControlError(f"Several sessions have a checkpoint. Choose one: {names}.", "ambiguous")


def checkpoint_delete(options: argparse.Namespace) -> int:
    """``checkpoint-delete NAME``."""
    with connect() as control:
        control.call(DeleteCheckpoint(options.name))
    _done(options, f"Deleted checkpoint {options.name}.")
    return 0


def daemon(options: argparse.Namespace) -> int:
    """``daemon``: start it; ``--foreground``: become it; ``--system``: serve all users."""
    if options.group and not options.system:
        raise ControlError("--group can only be used together with --system.", "bad-request")
    program = ["-m", "kernelproxy.agent"]
    place = None
    if options.system:
        place = system_place(options.group)
        program = ["-P", *program, "--system"]  # root must not search directories that users chose
        program += ["--group", options.group] if options.group else []
    if options.foreground:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *program, "--foreground"])
    if place is not None:
        start_detached(place.private, program)
        _done(options, f"Started the daemon of this machine. It listens at {place.socket}.")
        return 0
    with connect():
        pass
    _done(options, f"The daemon is running. It listens at {paths.socket_path()}.")
    return 0


def stop(options: argparse.Namespace) -> int:
    """``stop``: idempotent; succeeds without a daemon."""
    request = Stop(checkpoint=not options.no_checkpoint)
    try:
        with connect(start=False) as control, Line("Saving", wanted=not options.json) as line:
            reply = control.expect(StopReply, request, show=line.show_notebooks)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        client.end_kernels()  # kernels that ended servers have left
        _done(options, "The daemon was not running.")
        return 0
    message = "Stopped the daemon and its sessions."
    if options.json:
        _print_json({"message": message, **asdict(reply)})
        return 0
    for name in reply.checkpoints:
        print(f"Saved checkpoint {name}.")
    for problem in reply.problems:
        print(f"  not saved: {problem}")
    print(message)
    return 0


def why(options: argparse.Namespace) -> int:
    """Show the decisions about a session with their reasons, and its current state."""
    now = [s for s in _status().sessions if options.session in (s["id"], s["name"])]
    try:
        decisions = _decisions(options.session, options.count)
    except ControlError as error:
        if not now or error.reason != "unknown-session":
            raise
        decisions = []  # none so far
    if options.json:
        _print_json({"decisions": decisions})
        return 0
    for each in decisions:
        at = datetime.fromtimestamp(each["at"]).strftime("%Y-%m-%d %H:%M:%S")
        print(f"{at}  {each['reason']}")
    for each in now:
        print(f"now{' ' * 16}  {status_text.state_text(each)}")
    return 0


def _decisions(session: str, count: int) -> list[dict[str, Any]]:
    if paths.is_shared(paths.socket_path()):
        with connect(start=False) as control:
            return control.expect(WhyReply, Why(session, count)).decisions
    # Works without a daemon, too.
    return [asdict(each) for each in decision_log.read(paths.runtime_dir(), session, count)]


def show_doctor(options: argparse.Namespace) -> int:
    """``doctor``: exit status 1 if something is broken."""
    findings = doctor.examine(options.python)
    if options.json:
        _print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.state, finding.name, finding.text) for finding in findings]
        print(status_text.Table(("", "check", "result"), rows))
    return int(any(finding.state == "broken" for finding in findings))


def build(options: argparse.Namespace) -> int:
    """``build``: compile what users would otherwise compile at their first cell."""
    say = libraries.printer(sys.stderr)
    places = native.build_for_machine(native.find_torch(options.python), say)
    if options.json:
        _print_json({"directories": [str(each) for each in places]})
    else:
        print(*places, sep="\n")
    return 0


def run_program(options: argparse.Namespace) -> int:
    """``run SCRIPT``: in a session if possible, else without; return the script's exit status."""
    script = os.path.abspath(options.script)
    if not os.path.isfile(script):
        raise ControlError(f"The program {options.script} was not found.", "bad-request")
    env = {k: v for k, v in os.environ.items() if not k.startswith("SING_")}
    name = options.name or os.path.basename(script)
    try:
        session = _open_session(options.python, name, options.device)
    except (SingError, OSError) as error:
        denied = isinstance(error, ControlError) and error.reason == "not-allowed"
        if options.device or denied:
            raise  # the user requested a device or may not run at all: do not fall back
        print(f"jupyter_sing: CPU only: {escaped(str(error)).rstrip('.')}.", file=sys.stderr)
        return _wait(subprocess.Popen([options.python, script, *options.arguments], env=env))
    bundle = str(paths.bundle_dir())
    search = [bundle, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env |= {
        "PYTHONPATH": os.pathsep.join(search),
        "SING_BUNDLE": bundle,
        "SING_SESSION": session,
        "SING_SOCKET": str(paths.socket_path()),
    }
    under = [options.python, "-m", "kernelproxy.kernel.activation.run_script"]
    try:
        return _wait(subprocess.Popen([*under, script, *options.arguments], env=env))
    finally:
        _close_session(session)


def _open_session(python: str, name: str, device: str | None) -> str:
    """Open a session for a program; an environment without a usable torch gets none."""
    native.check_version(native.find_torch(python))
    request = OpenSession(
        name=name, kernel_id="", python=python, device=device, script=True, user=environment.user()
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


def _status() -> StatusReply:
    try:
        with connect(start=False) as control:
            return control.expect(StatusReply, StatusRequest(), timeout=ANSWER_SECONDS_MAX)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        return StatusReply(devices=[], sessions=[])


def _show_session(options: argparse.Namespace, reply: SessionReply) -> int:
    return _show(options, reply.session, status_text.state_text(reply.session))


def _show(options: argparse.Namespace, session: dict[str, Any], text: str) -> int:
    if options.json:
        _print_json(session)
    else:
        print(f"{session['name']}: {text}")
    return 0


def _done(options: argparse.Namespace, text: str) -> None:
    if options.json:
        _print_json({"message": text})
    else:
        print(text)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
