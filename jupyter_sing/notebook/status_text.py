"""Sessions and devices as user-facing words and tables (standard library only)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from jupyter_sing.notebook import session_tree
from kernelproxy.common.protocol.views import (
    AutomaticView,
    CheckpointView,
    DeviceView,
    OmissionView,
    RestoreView,
    SessionView,
    SharingView,
)
from kernelproxy.common.readable import (
    clock,
    device_label,
    device_name,
    escaped,
    sharing,
    soon,
    width,
)
from kernelproxy.common.units import bytes_text, interval_text, measured_text

# One word for each state; what happens next is in the session's own reason.
WORDS = {
    "running": "Running",
    "idle": "Idle",
    "queued": "Queued",
    "suspended": "Suspended",
    "restoring": "Restoring",
    "migrating": "Migrating",
    "failed": "Error",
    "preparing": "Preparing",
}
#: Texts for sessions of other users, whose reason is not shown.
NEXT = {"suspended": "Resumes when its owner runs a cell.", "queued": "Waiting for its turn."}


@dataclass(frozen=True)
class Table:
    """Table that renders as text and as HTML (IPython requests either).

    Parameters
    ----------
    header : sequence of str
    rows : sequence of sequences of str
        As long as the header.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [[escaped(cell) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(width(line[i]) for line in lines) for i in range(len(self.header))]
        texts = (
            "  ".join(c + " " * (most - width(c)) for c, most in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join(text.rstrip() for text in texts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(tag: str, cells: Sequence[str]) -> str:
            inner = "".join(
                f'<{tag} style="text-align:left">{html.escape(c)}</{tag}>' for c in cells
            )
            return f"<tr>{inner}</tr>"

        head, body = row("th", self.header), "".join(row("td", cells) for cells in self.rows)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def state_word(session: SessionView) -> str:
    """Return a session's state in a word, with its queue position if it waits: ``Queued, next``.

    For a session that takes turns the word is always the same, in its turn and between turns.
    """
    if session.get("shared"):
        return "Sharing"
    state, place = str(session["state"]), session["queue_position"]
    word = WORDS.get(state, state.capitalize())
    if state == "preparing" and (far := session["progress"]) and far["total"]:
        return f"{word}, {far['done']} of {far['total']}"
    if place is None:
        return word
    return f"{word}, next" if place == 1 else f"{word}, place {place}"


def sentence(session: SessionView) -> str:
    """Return why a session is in its state and what happens next; times are in local time."""
    if found := session.get("shared"):
        text = sharing(found["devices"], found["with"], found["share"])
        return f"{text} · {next_turn(session)}"
    return clock(session["reason"]) or NEXT.get(str(session["state"]), "")


def next_turn(session: SessionView) -> str:
    """Return when the next turn of a session that takes turns begins."""
    if session["queue_position"] is None:
        return "running now"
    wait = session["expected_wait"]
    return "waiting for the next turn" if wait is None else f"next turn {_in(wait)}"


def _in(seconds: float) -> str:
    about = soon(seconds)
    return f"in {about}" if about.startswith("about") else about


def state_text(session: SessionView) -> str:
    """Return a session's state and what happens next: ``Suspended by you. Resumes when …``."""
    word, text = state_word(session), sentence(session)
    if text.startswith((word, WORDS.get(str(session["state"]), word))):
        return text
    return f"{word}. {text}" if text else f"{word}."


def exactness_lines(session: SessionView) -> list[str]:
    """Return what is approximate in a session, and what would be after a recovery."""
    found, lines = session.get("exactness"), []
    if not found:
        return []
    if found["recovered_since"]:
        other = " One or more results had another size." if found["diverged"] else ""
        lines.append(
            clock(
                f"Recovered approximately since {found['recovered_since']}: values read since then "
                f"may differ slightly.{other}"
            )
        )
    if found["approximate_since"]:
        lines.append(clock(f"Recoverable, approximately since {found['approximate_since']}."))
    if found["deterministic"]:
        lines.append("Deterministic: a recovery is exact.")
    return lines


def deterministic_text(session: SessionView) -> str:
    """Return whether a session uses deterministic algorithms."""
    found = session.get("exactness")
    if found and found["deterministic"]:
        return "Deterministic: a recovery is exact, and some operations are slower."
    return "Not deterministic: on a GPU, a recovery is approximate for some operations."


def migration_text(session: SessionView) -> str:
    """Return where a session is after a migration, and how long the migration took."""
    where, done = f"Now on {device_name(session['device'])}.", session["migration"]
    if not done or not done["downtime"]:
        return where
    return f"{where} Moved in {done['seconds']:.1f} s, paused for {done['downtime']:.3f} s."


def pinned_text(session: SessionView) -> str:
    """Return whether a session's memory stays on its device, as text."""
    if not session["pinned"]:
        return "Not pinned: its memory may leave the GPU when other sessions need it."
    device = device_name(session["device"])
    if session["worker_pid"] is None:
        return f"Pinned: once resumed, its memory stays on {device}."
    return f"Pinned: its memory stays on {device}."


def priority_text(session: SessionView) -> str:
    """Return a session's priority as text."""
    level = session["priority"]
    return f"Priority: {level}" if level else "Priority: default"


def sessions_table(sessions: Sequence[SessionView]) -> Table:
    """Return the table of sessions, with their owners if there are several.

    The sessions of processes that another session's process started are below that session, and
    the ranks of a job below a row for the job.
    """
    several = len({s["owner"] for s in sessions}) > 1
    rows = []
    for row in session_tree.rows(sessions):
        s = row.ranks[0] if isinstance(row, session_tree.JobRow) else row.session
        owner = [s["owner"]] if several else []
        name = f"{'  ' * row.depth}{row.name}"
        if isinstance(row, session_tree.JobRow):
            rows.append(("", *owner, name, row.text, "", bytes_text(row.memory), ""))
            continue
        device = f"{device_label(s['device'])}{', pinned' if s['pinned'] else ''}"
        memory = bytes_text(s["memory"])
        rows.append((s["id"][:8], *owner, name, state_word(s), device, memory, sentence(s)))
    whose = ["owner"] if several else []
    header = ("id", *whose, "name", "state", "GPU", "memory", "details")
    return Table(header, rows)


def waits_line(sharing: SharingView) -> str:
    """Return how long cells waited for a device, and how often guarantees were missed; or ""."""
    waited = [
        f"{tier}: median {measured_text(found['p50'])}, p99 {measured_text(found['p99'])}"
        f" of {found['count']:,} {'cell' if found['count'] == 1 else 'cells'}"
        for tier, found in sharing.get("time_to_gpu", {}).items()
    ]
    if not waited:
        return ""
    broken = sharing["tier_violations"]
    hours = f"{broken:,} session-hour{'' if broken == 1 else 's'}"
    missed = f"\nBelow the guaranteed share of their tier: {hours}." if broken else ""
    return f"Time to GPU: {'; '.join(waited)}{missed}"


def checkpoints_table(checkpoints: Sequence[CheckpointView]) -> Table:
    """Return the table of checkpoints; for one that cannot be read it shows the reason."""
    rows = []
    for c in checkpoints:
        if "problem" in c:
            rows.append((c["name"], "", "", "", "", "", c["problem"]))
            continue
        when = _when(c["created"])
        omitted = f", {len(c['omitted'])} not saved" if c["omitted"] else ""
        rows.append(
            (
                c["name"],
                when,
                "automatic" if c["automatic"] else "you",
                "whole process" if "process" in c["forms"] else "variables",
                bytes_text(c["bytes"]),
                bytes_text(c["exclusive"]),
                f"{c['session']}: {_contents(len(c['saved']), c['files'])}{omitted}",
            )
        )
    return Table(("name", "created", "created by", "saved as", "size", "freed", "contents"), rows)


def checkpoint_made_lines(checkpoint: CheckpointView) -> list[str]:
    """Return what was saved, its size, and what is missing in one form or in all."""
    only = ", ".join(dict.fromkeys(each["name"] for each in checkpoint["only_process"]))
    return [
        f"Saved checkpoint {checkpoint['name']}: "
        f"{_contents(len(checkpoint['saved']), checkpoint['files'])}, "
        f"{bytes_text(checkpoint['bytes'])} ({bytes_text(checkpoint['exclusive'])} on disk)",
        *([f"  saved only with the process: {only}"] if only else []),
        *(f"  not saved: {line}" for line in omissions(checkpoint["omitted"])),
    ]


def checkpoint_lines(session: SessionView) -> list[str]:
    """Return which checkpoint can be restored, and any problem of automatic checkpoints."""
    found, lines = session["last_checkpoint"], []
    if found is not None:
        which = f"{found['name']} ({_when(found['created'])})"
        if found["died"]:
            lines.append(f"The last kernel died. Run %sing restore to restore {which}")
        elif found["earlier"]:
            lines.append(f"From an earlier kernel. Run %sing restore to restore {which}")
        else:
            lines.append(f"Last checkpoint: {which}")
    if session["automatic"]["problem"]:
        lines.append(f"No automatic checkpoint: {session['automatic']['problem']}")
    return lines


def automatic_text(automatic: AutomaticView) -> str:
    """Return when automatic checkpoints are made, as text."""
    reasons = []
    if automatic["every"] > 0:
        reasons.append(interval_text(automatic["every"]))
    if automatic["cells"] > 0:
        reasons.append(f"{automatic['cells']} cell{'' if automatic['cells'] == 1 else 's'}")
    if not reasons:
        return "Automatic checkpoints: off"
    text = (
        f"Automatic checkpoints: every {' or '.join(reasons)}; keeps the last {automatic['keep']}"
    )
    problem = automatic["problem"]
    return f"{text}\nNo automatic checkpoint: {problem}" if problem else text


def restored_lines(outcome: RestoreView) -> list[str]:
    """Return what was restored, which files were renamed, and what could not be restored."""
    contents = _contents(outcome["variables"], outcome["files"])
    process = ", with the process" if outcome.get("form") == "process" else ""
    return [
        f"Restored {contents} from {outcome['checkpoint']}{process}",
        *([f"  without the process: {outcome['why']}"] if outcome.get("why") else []),
        *(f"  renamed: {path} is now {where}" for path, where in outcome["aside"].items()),
        *(f"  not restored: {line}" for line in omissions(outcome["problems"])),
    ]


def omissions(found: Sequence[OmissionView]) -> list[str]:
    """Return one line for each thing that was not saved or not restored."""
    return [f"{each['name']}: {each['why']}" for each in found]


def _when(created: str) -> str:
    """Format a time in local time."""
    return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")


def _contents(variables: int, files: int) -> str:
    def some(count: int, what: str) -> str:
        return f"{count} {what}{'' if count == 1 else 's'}"

    return some(variables, "variable") + (f" and {some(files, 'file')}" if files else "")


def outside_lines(devices: Sequence[DeviceView], sessions: Sequence[SessionView]) -> list[str]:
    """Return a line about each process that uses a device outside of sessions."""
    kernels = {each["kernel_pid"]: each["name"] for each in sessions if each["kernel_pid"]}
    lines = []
    for device in devices:
        found = device.get("outside")
        for each in found["processes"] if found is not None else ():
            used = "memory" if each["memory"] is None else bytes_text(each["memory"])
            who = f"{escaped(each['user'])}: {escaped(each['command'])}"
            if each["pid"] in kernels:
                who += f", the kernel of session {escaped(kernels[each['pid']])}"
            lines.append(
                f"{device_name(device['id'])}: {used} is used outside of sessions by process "
                f"{each['pid']} ({who})."
            )
    return lines


def failures(devices: Sequence[DeviceView]) -> list[str]:
    """Return a sentence for each device that is out of use."""
    return [each["failure"] for each in devices if each["failure"]]


def devices_table(devices: Sequence[DeviceView]) -> Table:
    """Return the table of devices."""
    rows = [
        (
            device_name(d["id"]),
            d["id"],
            bytes_text(d["memory_used"]),
            bytes_text(d["memory_total"]),
            str(len(d["sessions"])),
        )
        for d in devices
    ]
    return Table(("GPU", "id", "used", "memory", "sessions"), rows)
