"""``%sing`` in notebooks (standard library and IPython only).

Each verb prints one short line and shows a table or nothing; errors are one line.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jupyter_sing.notebook import status_text, status_watcher
from jupyter_sing.notebook.checkpoint_outcome import CheckpointOutcome
from jupyter_sing.notebook.progress_bar import ProgressBar
from kernelproxy.common import paths, restart_note
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import (
    FORMS,
    LOCAL_RANKS_MAX,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    LastCheckpoint,
    Message,
    MigrateRequest,
    Pin,
    Resume,
    SessionReply,
    SetAutomatic,
    SetDeterministic,
    SetPriority,
    StatusReply,
    StatusRequest,
    Suspend,
)
from kernelproxy.common.protocol.views import CheckpointView, SessionView
from kernelproxy.common.readable import device_name, escaped
from kernelproxy.common.units import bytes_text, parse_duration
from kernelproxy.kernel import activation

HELP = """\
%sing status    show the GPU session of this notebook (also: %sing)
%sing suspend   free the GPU and keep the state; the next cell that needs it resumes
%sing resume    move the state back to the GPU now
%sing migrate DEVICE
                move the state to another GPU, such as cpu:1 or cuda:1
%sing pin       keep the memory on the GPU, even when idle (undo: %sing unpin);
                other sessions still get their turns
%sing priority [LEVEL]
                show or set the priority: premium, standard or basic, as far as the
                policy allows
%sing deterministic [on|off]
                show or set whether the state is exact after a recovery on a GPU, too;
                some operations are slower then
%sing ranks [N]
                show or set how many GPUs this notebook sees, so that libraries which
                start a process for each GPU start N; each gets a session of its own,
                on however many GPUs there are
%sing checkpoint [NAME]
                save the notebook to disk: variables and GPU memory, and the whole process
                where possible (--form namespace: only variables; --form process: fail
                if the process cannot be saved)
%sing checkpoints
                list the checkpoints
%sing restore [NAME]
                replace this notebook's variables with those of a checkpoint (default: its
                last one).
                A checkpoint contains code that runs: only restore checkpoints made by you
                or someone you trust. Also restores the process if it was saved (--form: as
                above)
%sing auto      show how often checkpoints are saved automatically
                (change: %sing auto 10m, %sing auto 20 cells, %sing auto off)
%sing help      show this text"""

# Resuming may wait for room, and suspending for the operator that runs now.
VERB_SECONDS_MAX = 600.0
UNKNOWN = "this session has ended: restart the kernel"

Reply = TypeVar("Reply", bound=Message)


def sing(line: str) -> Any:
    """Called by IPython for ``%sing line``; what it returns is displayed."""
    words = line.split()
    verb = words[0] if words else "status"
    function = _VERBS.get(verb)
    if function is None:
        _complain(f"%sing {line.strip()} is not a command. Run %sing help to list the commands")
        return None
    try:
        arguments, options = _options(words[1:])
        inspect.signature(function).bind(*arguments, **options)
    except (TypeError, ValueError):
        _complain(f"%sing {verb} has wrong arguments. Run %sing help to see the right ones")
        return None
    try:
        with restart_note.reporting(_complain):
            return function(*arguments, **options)
    except ControlError as error:
        _complain(error.message)
    except (SingError, OSError) as error:
        _complain(str(error))
    return None


def status() -> Any:
    """``%sing status``: one line about this notebook, a table of its session."""
    session_id = _session_id()
    if not session_id:
        return None
    session = _described(session_id)
    memory = bytes_text(session["memory"])
    _print(f"{status_text.state_text(session)} [{memory} on {device_name(session['device'])}]")
    for line in (*status_text.exactness_lines(session), *status_text.checkpoint_lines(session)):
        _print(line)
    return status_text.sessions_table([session])


def suspend() -> None:
    """``%sing suspend``: wait until everything that was issued is executed, then suspend."""
    session_id = _session_id()
    if session_id:
        client = activation.current().client
        with ProgressBar("Suspending", session_id):
            if client is not None:
                client.synchronize()
            found = _call(SessionReply, Suspend(session_id, "Suspended by %sing suspend"))
        _print(status_text.state_text(found.session))


def resume() -> None:
    """``%sing resume``."""
    session_id = _session_id()
    if session_id:
        with ProgressBar("Resuming", session_id):
            _call(SessionReply, Resume(session_id))
        session = _described(session_id)
        _print(f"Resumed on {device_name(session['device'])}. {status_text.state_text(session)}")


def migrate(device: str) -> None:
    """``%sing migrate DEVICE``."""
    session_id = _session_id()
    if session_id:
        with ProgressBar("Migrating", session_id):
            _call(SessionReply, MigrateRequest(session_id, device))
        _print(status_text.migration_text(_described(session_id)))


def pin() -> None:
    """``%sing pin``: stay resident."""
    _pin(True)


def unpin() -> None:
    """``%sing unpin``."""
    _pin(False)


def _pin(pinned: bool) -> None:
    session_id = _session_id()
    if session_id:
        _print(status_text.pinned_text(_call(SessionReply, Pin(session_id, pinned)).session))


def priority(level: str = "") -> None:
    """``%sing priority``, ``%sing priority LEVEL``."""
    session_id = _session_id()
    if not session_id:
        return
    if level:
        _print(
            status_text.priority_text(_call(SessionReply, SetPriority(session_id, level)).session)
        )
        return
    _print(status_text.priority_text(_described(session_id)))


def deterministic(wanted: str = "") -> None:
    """``%sing deterministic``, ``%sing deterministic on``, ``off``."""
    session_id = _session_id()
    if not session_id:
        return
    if wanted not in ("", "on", "off"):
        raise ControlError("Write %sing deterministic on, or off.", "bad-request")
    if wanted:
        request = SetDeterministic(session_id, wanted == "on")
        _print(status_text.deterministic_text(_call(SessionReply, request).session))
        return
    _print(status_text.deterministic_text(_described(session_id)))


def ranks(wanted: str = "") -> None:
    """``%sing ranks``, ``%sing ranks N``."""
    if not _session_id():
        return
    if wanted:
        if not wanted.isdecimal() or not 1 <= int(wanted) <= LOCAL_RANKS_MAX:
            raise ControlError(
                f"%sing ranks {wanted} is no number of ranks: write one from 1 to "
                f"{LOCAL_RANKS_MAX}.",
                "bad-request",
            )
        activation.set_ranks(int(wanted))
    seen = activation.ranks()
    _print(
        f"This notebook sees {seen} GPU{'' if seen == 1 else 's'}: programs that start a process "
        f"for each GPU start {seen}."
    )


def checkpoint(name: str = "", *, form: str = "") -> None:
    """``%sing checkpoint [NAME] [--form FORM]``: return when it is safe on disk."""
    session_id = _session_id()
    if not session_id:
        return
    from kernelproxy.kernel.checkpoint_client import begin  # with cloudpickle: only at need

    outcome = CheckpointOutcome(session_id)
    with ProgressBar("Saving") as bar:
        started = begin(session_id, _shell(), name, form=form)
        try:
            made = started.finish(bar.show)
        except ControlError as error:
            made = outcome.after(error)
    _print("\n".join(status_text.checkpoint_made_lines(made)))


def checkpoints() -> Any:
    """``%sing checkpoints``: list the checkpoints; works without a daemon, too."""
    hint = ""
    try:
        found = _call(CheckpointsReply, CheckpointsRequest()).checkpoints
    except ControlError as error:
        # The checkpoints of the machine's daemon are root's files.
        if error.reason != "no-daemon" or paths.is_shared(paths.socket_path()):
            raise
        found, hint = _stored(), error.message
    _print(f"{len(found)} checkpoint{'' if len(found) == 1 else 's'}")
    if found and hint:
        _print(hint)
    return status_text.checkpoints_table(found) if found else None


def _stored() -> list[CheckpointView]:
    """List the checkpoints on disk; in a thread, because the kernel's own runs an event loop."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from jupyter_sing import lost_sessions  # with the store: only at need

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(lost_sessions.stored())).result()


def restore(name: str = "", *, form: str = "") -> None:
    """``%sing restore [NAME] [--form FORM]``: default: the last checkpoint of this notebook."""
    from kernelproxy.kernel.checkpoint_client import take_out

    if not name:
        session_id = _session_id()
        if not session_id:
            return
        name = _call(CheckpointReply, LastCheckpoint(session_id)).checkpoint["name"]
    with ProgressBar("Restoring") as bar:
        outcome = take_out(_shell(), name, form, bar.show)
    _print("\n".join(status_text.restored_lines(outcome)))


def auto(*words: str) -> None:
    """``%sing auto``, ``%sing auto 10m``, ``%sing auto 20 cells``, ``%sing auto off``."""
    session_id = _session_id()
    if not session_id:
        return
    if words:
        every, cells = automatic_rule(words)
        session = _call(SessionReply, SetAutomatic(session_id, every, cells)).session
        _print(status_text.automatic_text(session["automatic"]))
        return
    _print(status_text.automatic_text(_described(session_id)["automatic"]))


def automatic_rule(words: Sequence[str]) -> tuple[float, int]:
    """Parse the intervals of automatic checkpoints: seconds between two, and cells between two.

    Raises
    ------
    ControlError
        If the words are not such an interval.
    """
    text = " ".join(words)
    if text == "off":
        return 0.0, 0
    found = re.fullmatch(
        r"(?:every )?(\d+(?:\.\d+)? ?(?:s|m|min|h|d))?(?:(?: or)? ?(\d+) ?cells?)?", text
    )
    every = parse_duration(found[1] or "0") if found else 0.0
    cells = int(found[2] or 0) if found else 0
    if not every and not cells:
        raise ControlError(
            f"%sing auto {text} is not an interval: write 90s, 10m, 2h, 20 cells or off.",
            "bad-request",
        )
    return every, cells


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()


def show_help() -> None:
    """``%sing help``."""
    _print(HELP)


_VERBS: dict[str, Callable[..., Any]] = {
    "status": status,
    "suspend": suspend,
    "resume": resume,
    "migrate": migrate,
    "pin": pin,
    "unpin": unpin,
    "priority": priority,
    "deterministic": deterministic,
    "ranks": ranks,
    "checkpoint": checkpoint,
    "checkpoints": checkpoints,
    "restore": restore,
    "auto": auto,
    "help": show_help,
}


def _options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate the arguments from the only option, `--form`.

    Raises
    ------
    ValueError
        If the option has a value that is not allowed.
    """
    given = " ".join(words).replace("--form=", "--form ").split()
    if "--form" not in given:
        return given, {}
    at = given.index("--form")
    (form,) = given[at + 1 : at + 2]
    if form not in FORMS:
        raise ValueError(form)
    return given[:at] + given[at + 2 :], {"form": form}


def _session_id() -> str:
    """Return the id of this kernel's session; print why and return "" if there is none."""
    if reason := status_watcher.reason():
        _print(f"CPU only: {reason}")
    return status_watcher.session_id()


def _described(session_id: str) -> SessionView:
    """Return the status of this kernel's session, including the work issued before this call.

    Raises
    ------
    ControlError
        If the daemon does not know the session.
    """
    for session in _call(StatusReply, StatusRequest(session_id)).sessions:
        if session["id"] == session_id:
            return session
    raise ControlError(UNKNOWN, "unknown-session")


def _call(reply_type: type[Reply], request: Message) -> Reply:
    with connect(start=False) as control:
        return control.expect(reply_type, request, timeout=VERB_SECONDS_MAX)


def _print(text: object) -> None:
    """Print text; escape it, because names in it may contain terminal control sequences."""
    print(escaped(str(text), but="\n"))


def _complain(text: str) -> None:
    print(f"jupyter_sing: {escaped(text.rstrip('.'))}.", file=sys.stderr)


def load_ipython_extension(ip: Any) -> None:
    """Register ``%sing`` (the entry point); called when a kernel starts, or by ``%load_ext``."""
    ip.register_magic_function(sing, magic_kind="line", magic_name="sing")
