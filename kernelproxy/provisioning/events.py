"""Events about sessions on the server's event bus (``jupyter_sing/events``)."""

from __future__ import annotations

from typing import Any

from kernelproxy.common.protocol.views import SessionView

EVENT_ID = "https://schema.jupyter.org/jupyter_sing/session/v1"

#: Fields of a session's description that an event contains unchanged.
_REPORTED_FIELDS = (
    "kernel_id", "state", "tier", "reason", "name", "owner", "memory", "pinned", "priority",
    "served_as", "recoverable", "queued_for", "queue_position", "expected_wait", "last_checkpoint",
    "suspended_by", "suspended_at", "shared", "promised", "job", "rank", "ranks",
)  # fmt: skip


def changed(session: SessionView) -> dict[str, Any]:
    """Return the event for a session's current state.

    Parameters
    ----------
    session : dict
        As in `StatusReply`.
    """
    found = {name: session.get(name) for name in _REPORTED_FIELDS}
    if session.get("progress"):
        found["progress"] = session["progress"]
    return {"session": session["id"], "device": session["device"] or "", **found}


def kernel_died(session: str, kernel_id: str, checkpoint: str) -> dict[str, Any]:
    """Return the event for a kernel that died and has a checkpoint.

    Parameters
    ----------
    session, kernel_id : str
        Ids of the session and the kernel that died.
    checkpoint : str
        Name of the last checkpoint of its notebook.
    """
    command = f"%sing restore {checkpoint}"
    return {
        "session": session,
        "kernel_id": kernel_id,
        "state": "failed",
        "tier": "cold",
        "device": "",
        "reason": f"The kernel died. Run {command} to restore the last checkpoint.",
        "checkpoint": checkpoint,
        "command": command,
    }
