"""Verbs about this machine: ``doctor``, ``build``, ``daemon`` and ``stop``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from jupyter_sing.cli import doctor
from jupyter_sing.cli.progress import ProgressLine
from jupyter_sing.cli.verbs import PYTHON_HELP, AddVerb, print_json, show_message
from jupyter_sing.notebook import status_text
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import connect, start_detached
from kernelproxy.common.protocol import Stop, StopReply
from kernelproxy.common.system_mode import system_place
from kernelproxy.kernel_host import client
from kernelproxy.native import build as native
from kernelproxy.native import libraries


def add_verbs(add: AddVerb) -> None:
    """Add the verbs; called once, for the parser of the command line."""
    doctor_parser = add("doctor", show_doctor, "check what works on this machine")
    doctor_parser.add_argument("--python", default=sys.executable, help=PYTHON_HELP)
    build_parser = add(
        "build", build, "compile GPU support once, for all users of this machine (as root)"
    )
    build_parser.add_argument("--python", default=sys.executable, help=PYTHON_HELP)
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
        show_message(options, f"Started the daemon of this machine. It listens at {place.socket}.")
        return 0
    with connect():
        pass
    show_message(options, f"The daemon is running. It listens at {paths.socket_path()}.")
    return 0


def stop(options: argparse.Namespace) -> int:
    """``stop``: idempotent; succeeds without a daemon."""
    request = Stop(checkpoint=not options.no_checkpoint)
    try:
        with (
            connect(start=False) as control,
            ProgressLine("Saving", wanted=not options.json) as line,
        ):
            reply = control.expect(StopReply, request, show=line.show_notebooks)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        client.end_kernels()  # kernels that ended servers have left
        show_message(options, "The daemon was not running.")
        return 0
    message = "Stopped the daemon and its sessions."
    if options.json:
        print_json({"message": message, **asdict(reply)})
        return 0
    for name in reply.checkpoints:
        print(f"Saved checkpoint {name}.")
    for problem in reply.problems:
        print(f"  not saved: {problem}")
    print(message)
    return 0


def show_doctor(options: argparse.Namespace) -> int:
    """``doctor``: exit status 1 if something is broken."""
    findings = doctor.examine(options.python)
    if options.json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(finding.state, finding.name, finding.text) for finding in findings]
        print(status_text.Table(("", "check", "result"), rows))
    return int(any(finding.state == "broken" for finding in findings))


def build(options: argparse.Namespace) -> int:
    """``build``: compile what users would otherwise compile at their first cell."""
    show = libraries.printer(sys.stderr)
    places = native.build_for_machine(native.find_torch(options.python), show)
    if options.json:
        print_json({"directories": [str(each) for each in places]})
    else:
        print(*places, sep="\n")
    return 0
