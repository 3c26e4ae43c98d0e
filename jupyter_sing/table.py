"""Sessions and devices as words and tables for people (standard library only)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

# One word for each state; what happens next is in the session's own reason.
WORDS = {
    "running": "Running",
    "idle": "Idle",
    "queued": "Queued",
    "suspended": "Suspended",
    "restoring": "Restoring",
    "migrating": "Migrating",
    "failed": "Error",
}
NEXT = {"suspended": "resumes when you run a cell", "queued": "starts when there is room"}


@dataclass(frozen=True)
class Table:
    """A table that shows itself as text and as HTML (IPython asks for either).

    Parameters
    ----------
    header : sequence of str
    rows : sequence of sequences of str
        As long as the header.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        texts = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
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


def bytes_text(count: int) -> str:
    """Write a number of bytes for people: ``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def state_text(session: dict[str, Any]) -> str:
    """Write a session's state and what happens next: ``Suspended: resumes when you …``."""
    state = str(session["state"])
    word, following = WORDS.get(state, state.capitalize()), NEXT.get(state)
    return f"{word}: {following}" if following else word


def migration_text(session: dict[str, Any]) -> str:
    """Say where a session is after a migration, and what that has cost."""
    where, done = f"{state_text(session)} on {session['device']}", session["migration"]
    if not done or not done["downtime"]:
        return where
    return f"{where} (moved in {done['seconds']:.1f} s, stood still {done['downtime']:.3f} s)"


def sessions_table(sessions: Sequence[dict[str, Any]]) -> Table:
    """Make the table of sessions."""
    rows = [
        (
            s["id"][:8],
            s["name"],
            WORDS.get(s["state"], s["state"].capitalize()),
            s["device"] or "",
            bytes_text(s["memory"]),
            f"{s['operators']:,}",
            s["reason"],
        )
        for s in sessions
    ]
    return Table(("id", "name", "state", "device", "memory", "operators", "reason"), rows)


def checkpoints_table(checkpoints: Sequence[dict[str, Any]]) -> Table:
    """Make the table of checkpoints; of one that cannot be read it says why."""
    rows = []
    for c in checkpoints:
        if "problem" in c:
            rows.append((c["name"], "", "", "", "", c["problem"]))
            continue
        when = datetime.fromisoformat(c["created"]).astimezone().strftime("%Y-%m-%d %H:%M")
        left_out = f", {len(c['omitted'])} left out" if c["omitted"] else ""
        rows.append(
            (
                c["name"],
                when,
                "automatic" if c["automatic"] else "by hand",
                bytes_text(c["bytes"]),
                bytes_text(c["exclusive"]),
                f"{c['session']}: {_contents(len(c['saved']), c['files'])}{left_out}",
            )
        )
    return Table(("name", "made", "how", "size", "of its own", "what"), rows)


def checkpoint_text(checkpoint: dict[str, Any]) -> str:
    """Say what was put away, and what it costs."""
    return (
        f"Checkpoint {checkpoint['name']}: "
        f"{_contents(len(checkpoint['saved']), checkpoint['files'])}, "
        f"{bytes_text(checkpoint['bytes'])} ({bytes_text(checkpoint['exclusive'])} on disk)"
    )


def restored_lines(outcome: dict[str, Any]) -> list[str]:
    """Say what was taken out, what was in the way, and what could not be restored."""
    contents = _contents(outcome["variables"], outcome["files"])
    return [
        f"Restored {contents} from {outcome['checkpoint']}",
        *(f"  kept aside: {path} is {where}" for path, where in outcome["aside"].items()),
        *(f"  not restored: {line}" for line in omissions(outcome["problems"])),
    ]


def omissions(found: Sequence[dict[str, Any]]) -> list[str]:
    """Write one line for each thing that was not saved or not restored."""
    return [f"{each['name']}: {each['why']}" for each in found]


def _contents(variables: int, files: int) -> str:
    def some(count: int, what: str) -> str:
        return f"{count} {what}{'' if count == 1 else 's'}"

    return some(variables, "variable") + (f" and {some(files, 'file')}" if files else "")


def devices_table(devices: Sequence[dict[str, Any]]) -> Table:
    """Make the table of devices."""
    rows = [
        (
            d["id"],
            d["kind"],
            bytes_text(d["memory_used"]),
            bytes_text(d["memory_total"]),
            str(len(d["sessions"])),
        )
        for d in devices
    ]
    return Table(("device", "kind", "used", "memory", "sessions"), rows)
