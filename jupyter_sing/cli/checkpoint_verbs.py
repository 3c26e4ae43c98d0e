"""Verbs about checkpoints: ``checkpoint``, ``checkpoints``, ``restore``, ``checkpoint-delete``."""

from __future__ import annotations

import argparse

from jupyter_sing.cli.progress import ProgressLine, WaitLines
from jupyter_sing.cli.verbs import SESSION_HELP, AddVerb, print_json, show_message
from jupyter_sing.notebook import status_text
from jupyter_sing.notebook.checkpoint_outcome import CheckpointOutcome
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import Control, connect
from kernelproxy.common.protocol import (
    FORMS,
    Checkpoint,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    DeleteCheckpoint,
    LastCheckpoint,
    Restore,
    RestoreReply,
    StatusReply,
    StatusRequest,
)
from kernelproxy.common.readable import quoted


def add_verbs(add: AddVerb) -> None:
    """Add the verbs; called once, for the parser of the command line."""
    form = "namespace: only variables; process: the whole process (default: process if possible)"
    checkpoint_parser = add("checkpoint", checkpoint, "save a checkpoint of a notebook")
    checkpoint_parser.add_argument("session", help=SESSION_HELP)
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


def checkpoint(options: argparse.Namespace) -> int:
    """``checkpoint S``: wait for a running cell; return when it is safe on disk."""
    outcome = CheckpointOutcome(options.session)
    with connect(start=False) as control, ProgressLine("Saving", wanted=not options.json) as line:
        name = options.name or options.called or ""
        request = Checkpoint(options.session, name, form=options.form)
        with WaitLines(options.session, wanted=not options.json):
            try:
                made = control.expect(CheckpointReply, request, show=line.show_bytes).checkpoint
            except ControlError as error:
                made = outcome.after(error)
    if options.json:
        print_json(made)
        return 0
    print("\n".join(status_text.checkpoint_made_lines(made)))
    return 0


def checkpoints(options: argparse.Namespace) -> int:
    """``checkpoints``: list them, newest first."""
    with connect() as control:
        found = control.expect(CheckpointsReply, CheckpointsRequest()).checkpoints
    if options.json:
        print_json({"checkpoints": found})
    else:
        print(status_text.checkpoints_table(found) if found else "No checkpoints.")
    return 0


def restore(options: argparse.Namespace) -> int:
    """``restore NAME``: wait for a running cell; return when the notebook is restored."""
    with connect() as control, ProgressLine("Restoring", wanted=not options.json) as line:
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
        print_json(outcome)
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
    show_message(options, f"Deleted checkpoint {options.name}.")
    return 0
