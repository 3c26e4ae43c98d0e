"""Texts of the widget about this notebook and its devices (standard library only).

All words are here, except those for states: `jupyter_sing.notebook.status_text`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from jupyter_sing.notebook import status_text
from jupyter_sing.notebook.status_watcher import KnownStatus
from kernelproxy.common.protocol.views import DeviceView, SessionView
from kernelproxy.common.readable import device_label, device_name, soon, turn, without_turn
from kernelproxy.common.units import bytes_text

SUSPEND, RESUME, CHECKPOINT = "Suspend", "Resume now", "Save checkpoint"
PIN = "Keep on GPU"
HINTS = {
    SUSPEND: "Free the GPU and keep the state; the next cell resumes the session",
    RESUME: "Move the state back to the GPU now",
    PIN: "Keep the memory on the GPU, even when idle; other sessions still get their turns",
    CHECKPOINT: "Save the whole notebook to disk, as soon as no cell is running",
}
#: Texts while the action of a button is in progress.
DOING = {
    SUSPEND: "Suspending: saving the state …",
    RESUME: "Resuming …",
    PIN: "",
    CHECKPOINT: "Saving a checkpoint as soon as no cell is running …",
}
#: One glyph for each state, beside its word: shapes, so that they differ without colour.
GLYPHS = {
    "running": "▶",
    "idle": "○",
    "queued": "◷",
    "suspended": "❚❚",
    "restoring": "↻",
    "migrating": "⇄",
    "failed": "⚠",
    "preparing": "…",
}
UNKNOWN_GLYPH = "?"
#: Glyph of a session that takes turns, regardless of which one executes now.
SHARING = GLYPHS["running"]
WAITING = "Connecting to the jupyter_sing daemon …"
UNKNOWN = "This session has ended. Restart the kernel."
NO_DAEMON = "No daemon"
GONE = "Ended"
CLOSED = "This view was closed. Run widget.status() for a new one."
WITHOUT_WIDGETS = "Not updated: ipywidgets is not installed in the kernel's environment."
STATIC = "As of {}; not updated. Run %sing status for the current state."
SINCE = "Since {}"
HERE = "this notebook"
OTHERS = "another user's"
PROGRESS = {"checkpoint": "Saving", "restore": "Restoring"}
_ELSEWHERE = {"parked": "in host memory", "cold": "on disk"}


@dataclass(frozen=True)
class View:
    """User-facing text of one moment.

    Parameters
    ----------
    glyph, word : str
        Of the state, or of the reason why there is none.
    sentence : str
        What happens next.
    memory : str
        How much memory is where.
    share : tuple of int or None
        Bytes of this notebook and of its device, if the session is resident.
    queue : str
        Queue position and expected wait; "" if the session does not wait.
    checkpoint : str
        The last checkpoint, and any problem of automatic ones; "" if there is neither.
    progress : str
        Save or restore in progress; "" if there is none.
    far : tuple of int or None
        Bytes of that operation, done and in total.
    pinned : bool
        Whether the session is pinned.
    can : frozenset of str
        Names of the enabled buttons.
    devices : Table or None
        Devices and the sessions on them.
    """

    glyph: str
    word: str
    sentence: str
    memory: str = ""
    share: tuple[int, int] | None = None
    queue: str = ""
    checkpoint: str = ""
    progress: str = ""
    far: tuple[int, int] | None = None
    pinned: bool = False
    can: frozenset[str] = frozenset()
    devices: status_text.Table | None = None

    @classmethod
    def of(cls, seen: KnownStatus | None, session_id: str) -> View:
        """Return the view of what is known; `session_id` is this notebook's session."""
        if seen is None:
            return cls(UNKNOWN_GLYPH, "", WAITING)
        devices = devices_table(seen, session_id) if seen.devices else None
        if seen.problem:
            return cls(UNKNOWN_GLYPH, NO_DAEMON, seen.problem, devices=devices)
        session = seen.sessions.get(session_id)
        if session is None:
            return cls(UNKNOWN_GLYPH, GONE, UNKNOWN, devices=devices)
        progress, far = progress_of(session)
        return cls(
            glyph=SHARING if session.get("shared") else GLYPHS.get(session["state"], UNKNOWN_GLYPH),
            word=word(session),
            sentence=without_turn(status_text.sentence(session)),
            memory=memory_text(session, seen.devices),
            share=share(session, seen.devices),
            queue=queue_text(session),
            checkpoint="; ".join(status_text.checkpoint_lines(session)),
            progress=progress,
            far=far,
            pinned=bool(session["pinned"]),
            can=buttons(session),
            devices=devices,
        )

    def lines(self) -> list[str]:
        """Return the view as lines of text, without the devices."""
        head_text = self.sentence
        if self.word and not head_text.startswith(self.word):
            head_text = f"{self.word}: {head_text}" if head_text else self.word
        head = f"{self.glyph} {head_text}" if self.word else head_text
        pinned = "Pinned: stays on its GPU" if self.pinned else ""
        found = [head, self.memory, self.queue, pinned, self.progress, self.checkpoint]
        return [each for each in found if each]

    def text(self, note: str = "") -> str:
        """Return the view as text, with a note below."""
        lines = self.lines()
        if self.devices is not None:
            lines += ["", str(self.devices)]
        return "\n".join([*lines, *(["", note] if note else [])])

    def state_html(self) -> str:
        """Return the state as HTML, without progress and devices; screen readers say changes."""
        glyph = f'<span aria-hidden="true">{html.escape(self.glyph)}</span>'
        # The word appears once, even if the sentence begins with it.
        again = bool(self.word) and self.sentence.startswith(self.word)
        rest = self.sentence.removeprefix(self.word) if again else f" {self.sentence}".rstrip()
        state = f"{glyph} <b>{html.escape(self.word)}</b>" if self.word else ""
        status = f'<div role="status">{f"{state}{html.escape(rest)}".strip()}</div>'
        bar = bar_html(*self.share, self.memory) if self.share else ""
        more = [f"{bar}{html.escape(self.memory)}" if self.memory else ""]
        more += [html.escape(each) for each in (self.queue, self.checkpoint)]
        return status + "".join(f"<div>{each}</div>" for each in more if each)

    def progress_html(self) -> str:
        """Return the save or restore in progress as HTML; "" if there is none."""
        if not self.progress:
            return ""
        bar = bar_html(*self.far, self.progress) if self.far else ""
        return f"<div>{bar}{html.escape(self.progress)}</div>"

    def devices_html(self) -> str:
        """Return the devices as HTML."""
        return "" if self.devices is None else self.devices._repr_html_()

    def html(self, note: str = "") -> str:
        """Return the whole view as static HTML, with a note below."""
        beneath = f"<div><i>{html.escape(note)}</i></div>" if note else ""
        return self.state_html() + self.progress_html() + self.devices_html() + beneath


def static_note(now: datetime) -> str:
    """Return the note that a static view is of the time `now`."""
    return STATIC.format(now.strftime("%Y-%m-%d %H:%M:%S"))


def since_html(moment: datetime) -> str:
    """Return since when the state is unchanged; a saved page shows it, too."""
    return f"<div><small>{SINCE.format(moment.strftime('%Y-%m-%d %H:%M:%S'))}</small></div>"


def word(session: SessionView) -> str:
    """Return the word of a session's state."""
    return status_text.state_word(session)


def memory_text(session: SessionView, devices: Sequence[DeviceView]) -> str:
    """Return how much memory of a session is where."""
    device = device_name(session["device"])
    if session["tier"] in _ELSEWHERE:
        snapshot = session["snapshot"]
        if snapshot is None and not session["operators"]:
            return f"Nothing on {device} yet"
        size = f"{bytes_text(snapshot['bytes'])} " if snapshot else ""
        return f"{size}{_ELSEWHERE[session['tier']]}, moved from {device}"
    total = next((d["memory_total"] for d in devices if d["id"] == session["device"]), 0)
    of = f" of {bytes_text(total)}" if total else ""
    return f"{bytes_text(session['memory'])}{of} on {device}"


def share(session: SessionView, devices: Sequence[DeviceView]) -> tuple[int, int] | None:
    """Return the bytes of a session and of its device; None while it is not resident."""
    if session["tier"] in _ELSEWHERE:
        return None
    total = next((d["memory_total"] for d in devices if d["id"] == session["device"]), 0)
    return (session["memory"], total) if total else None


def queue_text(session: SessionView) -> str:
    """Return the queue position of a session, and how long it is expected to wait."""
    position, wait = session.get("queue_position"), session.get("expected_wait")
    if session.get("shared"):
        return ""  # its sentence contains it
    if session["state"] != "queued" and position is None:
        return ""
    if position is not None:
        return turn(position, wait)
    return "Waiting time unknown." if wait is None else f"Its turn: {soon(wait)}."


def progress_of(session: SessionView) -> tuple[str, tuple[int, int] | None]:
    """Return the save or restore in progress for a session, with its bytes."""
    found = session["progress"]
    if found is None:
        return "", None
    what = PROGRESS.get(found["verb"], str(found["verb"]).capitalize())
    if found["verb"] == "prepare":  # its sentence contains the progress
        return "Preparing", (found["done"], found["total"]) if found["total"] else None
    if not found["total"]:
        return f"{what} {found['checkpoint']} …", None
    done, total = bytes_text(found["done"]), bytes_text(found["total"])
    return f"{what} {found['checkpoint']}: {done} of {total}", (found["done"], found["total"])


def buttons(session: SessionView) -> frozenset[str]:
    """Return the names of the enabled buttons."""
    state = session["state"]
    if state == "failed":
        return frozenset()
    found = {PIN, RESUME if state == "suspended" else SUSPEND}
    return frozenset(found if session["progress"] else found | {CHECKPOINT})


def devices_table(seen: KnownStatus, session_id: str) -> status_text.Table:
    """Return the table of devices and the sessions on them."""
    rows = []
    for device in seen.devices:
        there = [
            each
            for each in seen.sessions.values()
            if each["device"] == device["id"] and each["tier"] not in _ELSEWHERE
        ]
        waiting = sum(
            each["device"] == device["id"]
            and each["state"] == "queued"
            and not each.get("shared")  # it uses the device as much as the others
            for each in seen.sessions.values()
        )
        used = bytes_text(sum(each["memory"] for each in there))
        memory = f"{used} of {bytes_text(device['memory_total'])}"
        rows.append(
            (
                device_label(device["id"]),
                f"{memory}, out of use" if device["failure"] else memory,
                ", ".join(_holder(each, session_id) for each in there) or "no session",
                str(waiting or ""),
            )
        )
    return status_text.Table(("GPU", "memory", "used by", "waiting"), rows)


def _holder(session: SessionView, session_id: str) -> str:
    name = HERE if session["id"] == session_id else session["name"] or OTHERS
    return f"{name} ({word(session)}, {bytes_text(session['memory'])})"


def bar_html(done: int, total: int, text: str) -> str:
    """Return a progress bar with `text` as its label for screen readers."""
    label = html.escape(text, quote=True)
    return f'<progress value="{done}" max="{total}" aria-label="{label}"></progress> '


def message_html(lines: Sequence[str]) -> str:
    """Return the result of a button as HTML."""
    inner = "<br>".join(html.escape(each) for each in lines)
    return f'<div role="status">{inner}</div>' if inner else ""
