"""Device memory: who stays resident, and who goes when room is needed.

Sessions stay on a device after their cells while they fit; switching between residents costs
nothing. Only when room is needed does somebody go: whoever is least missed per byte, that is, has
the lowest rate of use times time to reload, and the time that it takes to leave, divided by bytes.
Sessions in flight and pinned ones never go.
"""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_sing.scheduler.state import HOLDING, DeviceState, Phase, Session

MARGIN = 0.05
"""Working sets grow between measurements: so much of a device is left free, if it can be."""


HORIZON = 10.0
"""Seconds ahead in which being missed counts."""


@dataclass(frozen=True, slots=True)
class Room:
    """How to make room: sessions to evict, and the seconds until their bytes are out."""

    victims: tuple[Session, ...]
    seconds: float


NO_VICTIMS = Room((), 0.0)


def may_leave(session: Session, now: float) -> bool:
    """Whether the memory of a session may be taken off its device now."""
    return (
        not session.pinned
        and not session.moving
        and now >= session.stays_until
        and session.phase not in HOLDING
        and session.phase is not Phase.RESERVED
    )


def missed(session: Session, device: DeviceState, now: float, dirty: bool) -> float:
    """Seconds per byte that are lost if a session goes: soon by itself, and now if it is dirty."""
    size = max(1, device.residents[session])
    back = device.constant_seconds + size / device.bytes_per_second
    rate = 1.0 if session.phase is not Phase.IDLE else session.gaps.rate(now)
    out = device.transfer(size) if dirty else 0.0
    return (min(1.0, rate * HORIZON) * back + out) / size


def shortage(session: Session, device: DeviceState) -> int:
    """Bytes that are missing for a session, with the margin."""
    here = device.residents.get(session, 0)
    return device.used - here + session.memory - int(device.memory / (1.0 + MARGIN))


def room(
    session: Session,
    device: DeviceState,
    now: float,
    leaving: tuple[Session, ...] = (),
    freed: int = 0,
    spared: tuple[Session, ...] = (),
) -> Room | None:
    """Find whom to evict for a session; None if it cannot fit.

    `leaving` hold leases now, but will not when this is carried out; `freed` bytes go
    anyway, and `spared` sessions are not asked to.
    """
    wanted = shortage(session, device) - freed
    if wanted <= 0:
        return NO_VICTIMS
    chosen: list[Session] = []
    seconds = 0.0
    candidates = [
        (missed(other, device, now, _is_dirty(other, leaving, now)), other.number, other)
        for other in device.residents
        if other is not session
        and other not in spared
        and (may_leave(other, now) or (other in leaving and not other.pinned))
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
    return Room(tuple(chosen), seconds)


def _is_dirty(session: Session, leaving: tuple[Session, ...], now: float) -> bool:
    """Whether it has executed so lately that its memory is not copied yet."""
    return session in leaving or now < session.clean_at


class HostMemory:
    """Bytes of parked sessions per node. What is beyond the budget goes to disk."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._used: dict[str, int] = {}
        self._sizes: dict[Session, tuple[str, int]] = {}

    def used(self, node: str) -> int:
        """Bytes that are parked, or about to be, on a node."""
        return self._used.get(node, 0)

    def try_park(self, session: Session, node: str, size: int) -> bool:
        """Reserve host memory for a session; False if the budget does not allow it."""
        self.leave(session)
        if self.used(node) + size > self.budget:
            return False
        self._used[node] = self.used(node) + size
        self._sizes[session] = (node, size)
        return True

    def leave(self, session: Session) -> None:
        """Give back what a session had; nothing if it had nothing."""
        known = self._sizes.pop(session, None)
        if known is not None:
            node, size = known
            self._used[node] -= size
