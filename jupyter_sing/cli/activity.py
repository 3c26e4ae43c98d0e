"""Who had the devices, asked of whoever knows: for REST and the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from jupyter_sing.notebook.status_text import Table, bytes_text
from kernelproxy.agent.status import activity_store
from kernelproxy.common import paths
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import Activity, ActivityReply
from kernelproxy.common.readable import clock, device_label, device_name

ANSWER_SECONDS_MAX = 60.0
DAY_SECONDS = 86_400.0


def of_the_time_since(since: float, resolution: float = 1.0) -> dict[str, Any]:
    """Say who had the devices; waits for a disk, or for the daemon of the machine.

    Parameters
    ----------
    since : float
        Seconds of the epoch.
    resolution : float
        Seconds.

    Returns
    -------
    dict
        `Activity` of ``openapi.yaml``.

    Raises
    ------
    ControlError
        If the machine's daemon cannot be asked.
    """
    if paths.is_shared(paths.socket_path()):
        with connect(start=False) as control:
            request = Activity(since, resolution)
            return control.expect(ActivityReply, request, timeout=ANSWER_SECONDS_MAX).activity
    # Without a daemon, too; and one that runs has better things to do.
    return activity_store.read(paths.runtime_dir(), since, time.time(), resolution, os.getuid())


def named(found: dict[str, Any], sessions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the same with sessions called as those of a status, as far as they are there."""
    names = {each["id"]: each["name"] for each in sessions}

    def name(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "name": names.get(entry["session"], entry["name"])}

    devices = [{**each, "held": [name(span) for span in each["held"]]} for each in found["devices"]]
    return {**found, "devices": devices, "events": [name(each) for each in found["events"]]}


def lines(found: dict[str, Any]) -> list[str]:
    """Write it down for people: a table for each device, and what happened."""
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
    return written or ["Nothing was recorded in that time."]


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
