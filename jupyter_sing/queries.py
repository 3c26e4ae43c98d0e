"""Queries to the daemon, or to its files if none runs: for REST and the command line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from jupyter_sing.controller import policy_file
from kernelproxy.agent.status import activity_store
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import ActivityReply, ActivityRequest, GetPolicy, PolicyReply
from kernelproxy.common.protocol.views import (
    ActivityView,
    DeviceActivityView,
    EventView,
    SessionView,
    SpanView,
)

ACTIVITY_SECONDS_MAX = 60.0
POLICY_SECONDS_MAX = 30.0
DAY_SECONDS = 86_400.0


def activity_since(since: float, resolution: float = 1.0) -> ActivityView:
    """Return which sessions used the devices; waits for a disk, or for the machine's daemon.

    Parameters
    ----------
    since : float
        Seconds of the epoch.
    resolution : float
        Seconds.

    Returns
    -------
    dict
        `ActivityRequest` of ``openapi.yaml``.

    Raises
    ------
    ControlError
        If the machine's daemon does not answer.
    """
    if paths.is_shared(paths.socket_path()):
        with connect(start=False) as control:
            request = ActivityRequest(since, resolution)
            return control.expect(ActivityReply, request, timeout=ACTIVITY_SECONDS_MAX).activity
    # Read from disk: works without a daemon, and does not load one that runs.
    return activity_store.read(paths.runtime_dir(), since, time.time(), resolution, os.getuid())


def with_names(found: ActivityView, sessions: Iterable[SessionView]) -> ActivityView:
    """Return a copy in which sessions have the names that a status gives them, where known."""
    names = {each["id"]: each["name"] for each in sessions}

    def name(entry: SpanView | EventView) -> str:
        return names.get(entry["session"], entry["name"])

    devices: list[DeviceActivityView] = [
        {**device, "held": [{**each, "name": name(each)} for each in device["held"]]}
        for device in found["devices"]
    ]
    events: list[EventView] = [{**each, "name": name(each)} for each in found["events"]]
    return {**found, "devices": devices, "events": events}


def standing_policy_text() -> str:
    """Return the policy in force, or the one that the next daemon applies; empty if none is.

    Raises
    ------
    ControlError
        If the daemon does not answer, or the policy cannot be read.
    """
    try:
        with connect(start=False) as control:
            return control.expect(PolicyReply, GetPolicy(), timeout=POLICY_SECONDS_MAX).policy
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
    return policy_file.kept(paths.runtime_dir())
