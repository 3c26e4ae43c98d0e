"""Device memory: which sessions stay resident, and which are evicted when room is needed.

Sessions stay on a device after their cells while they fit; switching between residents costs
nothing. Sessions are evicted only when room is needed, least cost per byte first. The cost is the
rate of use times the time to reload, and the time that the eviction takes, divided by bytes.
Sessions in flight and pinned ones are never evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.scheduler.state import HOLDING, EngineDevice, EngineSession, Phase

MARGIN = 0.05
"""Part of a device that is left free, if possible: working sets grow between measurements."""


HORIZON = 10.0
"""Seconds ahead in which a reload counts as a cost."""


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """Plan to make room: sessions to evict, and the seconds until their bytes are out."""

    victims: tuple[EngineSession, ...]
    seconds: float


NO_VICTIMS = RoomPlan((), 0.0)


def may_leave(session: EngineSession, now: float) -> bool:
    """True if the memory of a session may be taken off its device now."""
    return (
        not session.terms.pinned
        and not session.residency.moving
        and now >= session.residency.stays_until
        and session.phase not in HOLDING
        and session.phase is not Phase.RESERVED
    )


def missed(session: EngineSession, device: EngineDevice, now: float, dirty: bool) -> float:
    """Return the cost of an eviction, in seconds per byte: likely reload, and copy if dirty."""
    size = max(1, device.residents[session])
    back = device.constant_seconds + size / device.bytes_per_second
    rate = 1.0 if session.phase is not Phase.IDLE else session.gaps.rate(now)
    out = device.transfer(size) if dirty else 0.0
    return (min(1.0, rate * HORIZON) * back + out) / size


def shortage(session: EngineSession, device: EngineDevice, need: int | None = None) -> int:
    """Return the bytes that are missing for a session, with the margin; it needs `need`."""
    here = device.residents.get(session, 0)
    need = session.memory if need is None else need
    return device.used - here + need - int(device.memory / (1.0 + MARGIN))


def room(
    session: EngineSession,
    device: EngineDevice,
    now: float,
    leaving: tuple[EngineSession, ...] = (),
    freed: int = 0,
    spared: tuple[EngineSession, ...] = (),
    need: int | None = None,
) -> RoomPlan | None:
    """Find sessions to evict for a session; None if it cannot fit.

    `leaving` sessions hold leases now, but will not when this is carried out; `freed` bytes leave
    anyway, and `spared` sessions are not evicted. `need` is what it will have there, if that is not
    what it has on each device now.
    """
    wanted = shortage(session, device, need) - freed
    if wanted <= 0:
        return NO_VICTIMS
    chosen: list[EngineSession] = []
    seconds = 0.0
    candidates = [
        (missed(other, device, now, _is_dirty(other, leaving, now)), other.number, other)
        for other in device.residents
        if other is not session
        and other not in spared
        and (may_leave(other, now) or (other in leaving and not other.terms.pinned))
    ]
    candidates.sort()
    for _, _, other in candidates:
        if wanted <= 0:
            break
        size = device.residents[other]
        wanted -= size
        chosen.append(other)
        if _is_dirty(other, leaving, now):
            seconds += device.transfer(size)
    if wanted > int(device.memory * MARGIN / (1.0 + MARGIN)) + 1:
        return None
    return RoomPlan(tuple(chosen), seconds)


def _is_dirty(session: EngineSession, leaving: tuple[EngineSession, ...], now: float) -> bool:
    """True if it has executed so recently that its memory is not copied yet."""
    return session in leaving or now < session.residency.clean_at


class HostMemoryEstimate:
    """Bytes of suspended sessions per node. What exceeds the budget is spilled to disk."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._used: dict[str, int] = {}
        self._sizes: dict[EngineSession, tuple[str, int]] = {}

    def used(self, node: str) -> int:
        """Return the bytes that are suspended, or about to be, on a node."""
        return self._used.get(node, 0)

    def try_park(self, session: EngineSession, node: str, size: int) -> bool:
        """Reserve host memory for a session; False if the budget does not allow it."""
        self.leave(session)
        if self.used(node) + size > self.budget:
            return False
        self._used[node] = self.used(node) + size
        self._sizes[session] = (node, size)
        return True

    def leave(self, session: EngineSession) -> None:
        """Release the reservation of a session; no effect if it has none."""
        known = self._sizes.pop(session, None)
        if known is not None:
            node, size = known
            self._used[node] -= size
