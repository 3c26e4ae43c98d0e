"""Parts that the verbs of the command line share: help texts, the status request, replies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from jupyter_sing.notebook import status_text
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import SessionReply, StatusReply, StatusRequest
from kernelproxy.common.protocol.views import SessionView

ANSWER_SECONDS_MAX = 30.0
SESSION_HELP = "id of the session, a unique prefix of the id, or the name"
PYTHON_HELP = "Python interpreter that has torch (default: this one)"

#: Function of a verb; returns the exit status.
Verb = Callable[[argparse.Namespace], int]
#: Adds a verb to the parser: its name, its function, and its help.
AddVerb = Callable[[str, Verb, str], argparse.ArgumentParser]


def request_status() -> StatusReply:
    try:
        with connect(start=False) as control:
            return control.expect(StatusReply, StatusRequest(), timeout=ANSWER_SECONDS_MAX)
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        return StatusReply(devices=[], sessions=[])


def show_state(options: argparse.Namespace, reply: SessionReply) -> int:
    return show_session(options, reply.session, status_text.state_text(reply.session))


def show_session(options: argparse.Namespace, session: SessionView, text: str) -> int:
    if options.json:
        print_json(session)
    else:
        print(f"{session['name']}: {text}")
    return 0


def show_message(options: argparse.Namespace, text: str) -> None:
    if options.json:
        print_json({"message": text})
    else:
        print(text)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))
