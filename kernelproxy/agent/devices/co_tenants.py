"""Sessions that take turns on devices, and the share that each one gets.

The session that executes changes each second or two, which tells users little. So they see instead
with which sessions theirs takes turns: as long as it has had a turn recently and wants more, and
others do so on the same devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, Tenant
from kernelproxy.agent.devices.usage_history import AFTER_SECONDS, LATELY_SECONDS
from kernelproxy.common.protocol.views import SharedView

#: A share is one of at least so much device time; time that is missing counts in equal parts.
SETTLED_SECONDS = 10.0
#: Shares are rounded to multiples of this, because they change with the moving window.
_STEP = 0.05


def shared(
    session: Tenant, allocators: Sequence[DeviceAllocator], now: float | None = None
) -> SharedView | None:
    """Return with which sessions a session takes turns; None if it or all others take none.

    Parameters
    ----------
    session : Tenant
    allocators : sequence of DeviceAllocator
        All devices.
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
    here = [each for each in allocators if each.history.since(session.id, now) <= LATELY_SECONDS]
    tenants = {name: each for allocator in allocators for name, each in allocator.tenants.items()}
    others = {
        name: tenants[name]
        for allocator in here
        for name in (*allocator.tenants, *allocator.history.seconds(now))
        if name != session.id and name in tenants and _takes_turns(tenants[name], allocator, now)
    }
    if not others:
        return None
    # Time that a session had alone, before the others came, does not show what each gets.
    came = max(_first(name, here, now) for name in (session.id, *others))
    spent = [allocator.history.seconds(now, came) for allocator in here]
    total = sum(sum(each.values()) for each in spent)
    mine = sum(each.get(session.id, 0.0) for each in spent)
    if missing := max(0.0, SETTLED_SECONDS - total):  # the first turns say little: assume equal
        mine, total = mine + missing / (1 + len(others)), total + missing
    return {
        "devices": [allocator.device.id for allocator in here],
        "with": sorted(known_as(session, each) for each in others.values()),
        "share": round(_STEP * round(mine / total / _STEP), 2),
    }


def _first(name: str, here: Sequence[DeviceAllocator], now: float) -> float:
    """Return when the first recent turn of a session began; -inf if it still waits for one."""
    first = min(allocator.history.first(name, now) for allocator in here)
    return first if first <= now else -math.inf


def known_as(session: Tenant, other: Tenant | None) -> str:
    """Return another session's name for this one's owner; of other users', only the user's name."""
    if other is None:
        return "another session"
    return other.name if other.owner == session.owner else other.user


def _takes_turns(other: Tenant, allocator: DeviceAllocator, now: float) -> bool:
    if allocator.history.since(other.id, now) <= AFTER_SECONDS:
        return True
    # A session that waits for a device belongs to it until it gets another one.
    return other.wants_turns and (
        allocator.tenants.get(other.id) is other
        or allocator.history.since(other.id, now) <= LATELY_SECONDS
    )
