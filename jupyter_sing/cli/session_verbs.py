"""Verbs about one session: ``suspend``, ``resume``, ``migrate``, ``pin``, ``priority``, ``why``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime
from typing import cast

from jupyter_sing.cli.progress import WaitLines
from jupyter_sing.cli.verbs import (
    SESSION_HELP,
    AddVerb,
    print_json,
    request_status,
    show_session,
    show_state,
)
from jupyter_sing.controller import decision_log
from jupyter_sing.notebook import status_text
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import (
    MigrateRequest,
    Pin,
    Resume,
    SessionReply,
    SetDeterministic,
    SetPriority,
    StatusReply,
    StatusRequest,
    Suspend,
    Why,
    WhyReply,
)
from kernelproxy.common.protocol.views import DecisionView, SessionView
from kernelproxy.common.readable import quoted
from kernelproxy.common.scheduler_api import TIERS


def add_verbs(add: AddVerb) -> None:
    """Add the verbs; called once, for the parser of the command line."""
    suspend_parser = add("suspend", suspend, "free the GPU of a session and keep its state")
    resume_parser = add("resume", resume, "move the state of a session back to the GPU")
    for each in (suspend_parser, resume_parser):
        each.add_argument("session", help=SESSION_HELP)
    move = add("migrate", migrate, "move a session to another GPU while it runs")
    move.add_argument("session", help=SESSION_HELP)
    move.add_argument("device", help="id of the GPU, such as cpu:1 or cuda:0")
    pin_parser = add("pin", pin, "keep the memory of a session on its GPU")
    unpin_parser = add("unpin", pin, "allow the memory of a session to leave its GPU again")
    priority_parser = add("priority", priority, "show or set the priority of a session")
    exact = add("deterministic", deterministic, "show or set whether a session recovers exactly")
    for each in (pin_parser, unpin_parser, priority_parser, exact):
        each.add_argument("session", help=SESSION_HELP)
    pin_parser.set_defaults(pinned=True)
    unpin_parser.set_defaults(pinned=False)
    exact.add_argument("wanted", nargs="?", choices=("on", "off"), help="default: show it")
    levels = "priority to set, as far as the policy allows (default: show the current one)"
    priority_parser.add_argument("level", nargs="?", choices=TIERS, help=levels)
    explain = add("why", why, "show the scheduler's decisions about a session, with reasons")
    explain.add_argument("session", help=f"{SESSION_HELP}; ended sessions are found, too")
    explain.add_argument(
        "--count", type=int, default=20, help="number of decisions to show (default: 20)"
    )


def suspend(options: argparse.Namespace) -> int:
    """``suspend S``: return when the device is free."""
    request = Suspend(options.session, "Suspended by jupyter sing suspend")
    with connect(start=False) as control:
        return show_state(options, control.expect(SessionReply, request))


def resume(options: argparse.Namespace) -> int:
    """``resume S``: return when the session is on its device."""
    waiting = WaitLines(options.session, wanted=not options.json)
    with connect(start=False) as control, waiting:
        reply = control.expect(SessionReply, Resume(options.session))
    return show_state(options, reply)


def migrate(options: argparse.Namespace) -> int:
    """``migrate S DEVICE``: return when the session is on that device."""
    request = MigrateRequest(options.session, options.device)
    waiting = WaitLines(options.session, wanted=not options.json)
    with connect(start=False) as control, waiting:
        reply = control.expect(SessionReply, request)
    if options.json:
        print_json(reply.session)
    else:
        print(f"{reply.session['name']}: {status_text.migration_text(reply.session)}")
    return 0


def pin(options: argparse.Namespace) -> int:
    """``pin S`` and ``unpin S``: idempotent."""
    with connect(start=False) as control:
        reply = control.expect(SessionReply, Pin(options.session, options.pinned))
    return show_session(options, reply.session, status_text.pinned_text(reply.session))


def priority(options: argparse.Namespace) -> int:
    """``priority S LEVEL``, and ``priority S``, which shows it."""
    with connect(start=False) as control:
        if options.level:
            request = SetPriority(options.session, options.level)
            session = control.expect(SessionReply, request).session
        else:
            session = _session(control, options.session)
    return show_session(options, session, status_text.priority_text(session))


def deterministic(options: argparse.Namespace) -> int:
    """``deterministic S on``, ``off``, and ``deterministic S``, which shows it."""
    with connect(start=False) as control:
        if options.wanted:
            request = SetDeterministic(options.session, options.wanted == "on")
            session = control.expect(SessionReply, request).session
        else:
            session = _session(control, options.session)
    return show_session(options, session, status_text.deterministic_text(session))


def _session(control: Control, name: str) -> SessionView:
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
    return found[0]


def why(options: argparse.Namespace) -> int:
    """Show the decisions about a session with their reasons, and its current state."""
    now = [s for s in request_status().sessions if options.session in (s["id"], s["name"])]
    try:
        decisions = _decisions(options.session, options.count)
    except ControlError as error:
        if not now or error.reason != "unknown-session":
            raise
        decisions = []  # none so far
    if options.json:
        print_json({"decisions": decisions})
        return 0
    for each in decisions:
        at = datetime.fromtimestamp(each["at"]).strftime("%Y-%m-%d %H:%M:%S")
        print(f"{at}  {each['reason']}")
    for one in now:
        for line in (status_text.state_text(one), *status_text.exactness_lines(one)):
            print(f"now{' ' * 16}  {line}")
    return 0


def _decisions(session: str, count: int) -> list[DecisionView]:
    if paths.is_shared(paths.socket_path()):
        with connect(start=False) as control:
            return control.expect(WhyReply, Why(session, count)).decisions
    # Works without a daemon, too.
    found = decision_log.read(paths.runtime_dir(), session, count)
    return [cast("DecisionView", asdict(each)) for each in found]
