"""Verbs about devices: ``status``, ``devices`` and ``activity``."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from datetime import datetime

from jupyter_sing import queries
from jupyter_sing.cli.verbs import AddVerb, print_json, request_status
from jupyter_sing.notebook import status_text
from jupyter_sing.notebook.status_text import Table
from kernelproxy.common.protocol import StatusReply
from kernelproxy.common.protocol.views import ActivityView
from kernelproxy.common.readable import clock, device_label, device_name
from kernelproxy.common.units import bytes_text

#: Spans of a session in a user-facing table: the shown time divided by this is the resolution.
_SPANS_SHOWN = 200


def add_verbs(add: AddVerb) -> None:
    """Add the verbs; called once, for the parser of the command line."""
    add("status", status, "show GPUs and sessions")
    add("devices", devices, "show GPUs")
    had = add("activity", show_activity, "show which sessions used the GPUs, and their events")
    until_now = "number of hours to show (default: 24; older records are deleted)"
    had.add_argument("--hours", type=_hours, default=24.0, help=until_now)


def status(options: argparse.Namespace) -> int:
    """``status``: without a daemon both lists are empty; starts no daemon."""
    found = request_status()
    if options.json:
        print_json(
            {
                name: each
                for name, each in asdict(found).items()
                if each or name not in ("sharing", "elsewhere")
            }
        )
    elif not found.devices:
        print("The daemon is not running. It starts with the first notebook or program.")
    else:
        print(status_text.devices_table(found.devices))
        _print_others(found)
        print()
        print(status_text.sessions_table(found.sessions) if found.sessions else "No sessions.")
        if waited := status_text.waits_line(found.sharing):
            print(f"\n{waited}")
    return 0


def devices(options: argparse.Namespace) -> int:
    """``devices``: like `status`, without the sessions."""
    found = request_status()
    if options.json:
        print_json({"devices": found.devices})
    elif not found.devices:
        print("The daemon is not running. It starts with the first notebook or program.")
    else:
        print(status_text.devices_table(found.devices))
        _print_others(found)
    return 0


def _print_others(found: StatusReply) -> None:
    """Print what else there is of GPUs: failures, other daemons, and processes without one."""
    lines = [*status_text.failures(found.devices), *found.elsewhere]
    lines += status_text.outside_lines(found.devices, found.sessions)
    if lines:
        print("\n" + "\n".join(lines))


def show_activity(options: argparse.Namespace) -> int:
    """``activity``: includes the time before the daemon started; works without a daemon."""
    seconds = 3600.0 * options.hours
    resolution = 1.0 if options.json else seconds / _SPANS_SHOWN
    found = queries.activity_since(max(0.0, time.time() - seconds), resolution)
    if options.json:
        print_json(found)
    else:
        print("\n".join(_activity_lines(found)))
    return 0


def _hours(text: str) -> float:
    """Parse a number of hours."""
    hours = float(text)
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of hours above 0")
    return hours


def _activity_lines(found: ActivityView) -> list[str]:
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
