"""``jupyter sing``: device sessions on the command line.

Exit status 0, or 1 and one line on stderr, or 2 for usage. With ``--json`` a verb prints one JSON
object, also when it fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from jupyter_sing.cli import (
    checkpoint_verbs,
    daemon_verbs,
    device_verbs,
    policy,
    program,
    session_verbs,
    simulate,
)
from jupyter_sing.cli.output import safe_output
from jupyter_sing.cli.verbs import Verb, print_json
from kernelproxy.common import restart_note
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.readable import escaped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit status; the entry point of ``jupyter-sing``."""
    options = parser().parse_args(arguments)
    with safe_output():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Run a verb; report its exceptions as one line."""
    verb: Verb = options.function
    try:
        with restart_note.reporting(lambda text: print(text, file=sys.stderr, flush=True)):
            return verb(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (SingError, OSError) as error:
        reason = error.reason if isinstance(error, ControlError) else "failed"
        text = _text(error)
        if options.json:
            print_json({"message": text, "reason": reason})
        else:
            print(f"jupyter sing: {escaped(text)}", file=sys.stderr)
        return 1


def _text(error: Exception) -> str:
    """Return an error's message; for an OS error with a file, the file's name and no errno."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    return str(error)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON, for programs")
    result = argparse.ArgumentParser(
        prog="jupyter sing",
        description="Manage GPU sessions of notebooks and programs, and their checkpoints.",
    )
    verbs = result.add_subparsers(title="verbs", required=True, metavar="VERB")

    def add(name: str, function: Verb, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, parents=[common], help=text, description=text)
        verb.set_defaults(function=function)
        return verb

    device_verbs.add_verbs(add)
    program.add_verb(add)
    session_verbs.add_verbs(add)
    checkpoint_verbs.add_verbs(add)
    policy.add_verbs(verbs, common)
    simulate.add_verb(verbs, common)
    daemon_verbs.add_verbs(add)
    return result
