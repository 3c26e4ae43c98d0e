"""Use of the devices over time, as user-facing lines."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jupyter_sing.notebook.status_text import Table
from kernelproxy.common.readable import clock, device_label, device_name
from kernelproxy.common.units import bytes_text


def lines(found: dict[str, Any]) -> list[str]:
    """Return a table for each device, and the events, as user-facing lines."""
    written: list[str] = []
    for device in found["devices"]:
        peak = max((count for _, count in device["memory"]), default=0)
        waited = max((count for _, count in device["queue"]), default=0)
        written.append(
            f"{device_label(device['id'])}: executed for {device['executed']:,.1f} s, "
            f"peak memory {bytes_text(peak)} of {bytes_text(device['memory_total'])}, "
            f"longest queue {waited}"
        )
        rows = [
            (
                _clock(span["start"]),
                _clock(span["end"]),
                f"{span['seconds']:,.1f} s",
                span["state"],
                span["name"] or span["session"],
                span["owner"],
            )
            for span in device["held"]
        ]
        table = Table(("from", "to", "for", "state", "session", "owner"), rows)
        written += [str(table) if rows else "Not used.", ""]
    for each in found["events"]:
        who = each["name"] or each["session"]
        written.append(
            f"{_clock(each['at'])}  {who} on {device_name(each['device'])}: {clock(each['text'])}"
        )
    return written or ["No GPU was used in that time."]


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
