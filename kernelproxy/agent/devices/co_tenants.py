"""With whom a session takes turns, and what it gets of the devices: what outlasts a turn.

Who executes now changes each second or two, and tells people little. So they are told this of a
session that has had a turn lately and wants more, as long as others do so on the same devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from kernelproxy.agent.devices.device_allocator import Room, Tenant
from kernelproxy.agent.devices.usage_history import AFTER_SECONDS, LATELY_SECONDS

#: Device time that a share is one of at least; what there is not yet counts in equal parts.
SETTLED_SECONDS = 10.0
#: To what a share is rounded: it is one of a window that moves.
_STEP = 0.05


def shared(
    session: Tenant, rooms: Sequence[Room], now: float | None = None
) -> dict[str, Any] | None:
    """Say with whom a session takes turns; None if it takes none, or nobody else does.

    Parameters
    ----------
    session : Tenant
    rooms : sequence of Room
        All that there are.
    now : float, optional
        Seconds of the monotonic clock.

    Returns
    -------
    dict or None
        As `shared` of a session in ``openapi.yaml``.
    """
    now = time.monotonic() if now is None else now
    if not session.wants_turns:
        return None
    here = [each for each in rooms if each.history.since(session.id, now) <= LATELY_SECONDS]
    tenants = {name: each for room in rooms for name, each in room.tenants.items()}
    others = {
        name: tenants[name]
        for room in here
        for name in (*room.tenants, *room.history.seconds(now))
        if name != session.id and name in tenants and _takes_turns(tenants[name], room, now)
    }
    if not others:
        return None
    # What one had alone before the others came says nothing of what each gets.
    came = max(_first(name, here, now) for name in (session.id, *others))
    spent = [room.history.seconds(now, came) for room in here]
    total = sum(sum(each.values()) for each in spent)
    mine = sum(each.get(session.id, 0.0) for each in spent)
    if missing := max(0.0, SETTLED_SECONDS - total):  # the first turns say little: as if equal
        mine, total = mine + missing / (1 + len(others)), total + missing
    return {
        "devices": [room.device.id for room in here],
        "with": sorted(known_as(session, each) for each in others.values()),
        "share": round(_STEP * round(mine / total / _STEP), 2),
    }


def _first(name: str, here: Sequence[Room], now: float) -> float:
    """When the first turn began that a session had lately; -inf for who still waits for one."""
    first = min(room.history.first(name, now) for room in here)
    return first if first <= now else -math.inf


def known_as(session: Tenant, other: Tenant | None) -> str:
    """Say who another session is, as the owner of this one may know: of others', whose it is."""
    if other is None:
        return "another session"
    return other.name if other.owner == session.owner else other.user


def _takes_turns(other: Tenant, room: Room, now: float) -> bool:
    if room.history.since(other.id, now) <= AFTER_SECONDS:
        return True
    # Who waits for a device belongs to it till it gets another one.
    return other.wants_turns and (
        room.tenants.get(other.id) is other or room.history.since(other.id, now) <= LATELY_SECONDS
    )
