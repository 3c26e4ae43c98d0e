"""Sentences about jobs of several ranks, and the number of devices on which they run."""

from __future__ import annotations

import math

from jupyter_sing.scheduler.settings import Tier
from jupyter_sing.scheduler.state import EngineSession, Gang
from kernelproxy.common.units import interval_text


def devices_text(count: int) -> str:
    """Return a number of devices in words."""
    return f"{count} device{'' if count == 1 else 's'}"


def claim(session: EngineSession, victim: EngineSession, *, guaranteed: bool) -> str:
    """Return by which right a waiting session gets a device of a gang, as a clause."""
    if guaranteed:
        return f"{session.id} waits for what virtual cluster {session.vc} is guaranteed"
    if session.terms.tier is not victim.terms.tier and session.terms.tier is not Tier.BASIC:
        return f"{session.id} waits with {session.terms.tier}"
    return f"{session.id} waits, and goes first"


def shrink_text(ranks: int, before: int, after: int, cause: str) -> str:
    """Return what is decided about a gang that gives devices back, as a clause."""
    return f"Job of {ranks} ranks shrinks from {devices_text(before)} to {after}: {cause}"


def grow_text(ranks: int, before: int, after: int, seconds: float) -> str:
    """Return what is decided about a gang that grows onto idle devices, as a clause."""
    more = after - before
    idle = "a device is" if more == 1 else f"{more} devices are"
    if seconds > 0.0:
        has = "has" if more == 1 else "have"
        which = "a device" if more == 1 else f"{more} devices"
        idle = f"{which} {has} been"
        since = f" for {interval_text(seconds)}"
    else:
        since = ""
    return f"Job of {ranks} ranks grows from {devices_text(before)} to {after}: {idle} idle{since}"


def size_text(gang: Gang, devices: int, grow_after: float) -> str:
    """Return on how many devices a gang runs, and why on no more, as a clause."""
    if devices >= gang.most or not gang.cause:
        return f"Job of {gang.ranks} ranks runs on {devices_text(devices)}"
    again = "again " if gang.shrunk else ""
    if grow_after == math.inf:
        grows = f"the policy does not let it grow {again}".rstrip()
    elif grow_after > 0.0:
        grows = f"it grows {again}when a device has been idle for {interval_text(grow_after)}"
    else:
        grows = f"it grows {again}when a device is idle"
    return (
        f"Job of {gang.ranks} ranks runs on {devices} of {devices_text(gang.most)}:"
        f" {gang.cause}; {grows}"
    )
