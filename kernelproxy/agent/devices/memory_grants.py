"""Device memory: the grants of sessions, and plans to make room for one of them. Pure.

Every resident session holds a grant; the grants of a device never exceed its memory. A client
allocates within its grant without asking, and the worker enforces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernelproxy.common.errors import InternalError


class GrantTable:
    """The grants of one device, in bytes.

    Parameters
    ----------
    total : int
        Bytes of the device.
    step : int
        Granularity of grants, where there is room for it.
    """

    def __init__(self, total: int, step: int) -> None:
        self.total, self.step = total, step
        self._grants: dict[str, int] = {}

    @property
    def granted(self) -> int:
        """Bytes granted to all sessions together."""
        return sum(self._grants.values())

    @property
    def free(self) -> int:
        """Bytes that are not granted to any session."""
        return self.total - self.granted

    def of(self, session: str) -> int:
        """Return the bytes granted to a session."""
        return self._grants.get(session, 0)

    def short(self, session: str, need: int) -> int:
        """Return the bytes missing for a session to hold `need`; 0 if there is room."""
        return max(0, need - self.of(session) - self.free)

    def rounded(self, session: str, need: int) -> int:
        """Round `need` up to whole steps, as far as there is room."""
        steps = -(-need // self.step) * self.step
        return max(need, min(steps, self.of(session) + self.free))

    def hold(self, session: str, grant: int) -> None:
        """Set a session's grant.

        Raises
        ------
        InternalError
            If the device does not have that much.
        """
        if grant < 0 or self.short(session, grant):
            raise InternalError(f"{grant} bytes were granted where {self.free} are free")
        self._grants[session] = grant

    def release(self, session: str) -> None:
        """Take a session's grant back. Idempotent."""
        self._grants.pop(session, None)


@dataclass(frozen=True)
class Neighbour:
    """A session beside the one that needs room.

    Parameters
    ----------
    session : str
    granted, used : int
        Bytes; the difference can be taken back.
    idle_since : float or None
        When it last did something, in seconds of any one clock; None if it is busy.
    """

    session: str
    granted: int
    used: int
    idle_since: float | None


@dataclass(frozen=True)
class GrantPlan:
    """Plan to make room: grants to cut to a new size, and sessions to suspend, in order."""

    cut: dict[str, int] = field(default_factory=dict)
    suspend: list[str] = field(default_factory=list)


def plan_room(short: int, neighbours: Sequence[Neighbour]) -> GrantPlan | None:
    """Return the way to free `short` bytes that disturbs other sessions least.

    Unused grants are cut first, the largest first, because that costs no session anything. Then
    idle neighbours are suspended, the longest idle first, and no more of them than needed.

    Returns
    -------
    GrantPlan or None
        None if there is no way: then no session should be disturbed.
    """
    if short <= 0:
        return GrantPlan()
    kept = {each.session: min(each.granted, each.used) for each in neighbours}
    unused = {each.session: each.granted - kept[each.session] for each in neighbours}
    idle = {each.session: each.idle_since for each in neighbours if each.idle_since is not None}
    suspend: list[str] = []
    freed = sum(unused.values())
    for name in sorted(idle, key=lambda name: (idle[name], name)):
        if freed >= short:
            break
        if kept[name]:
            suspend.append(name)
            freed += kept[name]
    if freed < short:
        return None
    # A later victim may be so large that an earlier one can stay.
    for name in list(suspend):
        if freed - kept[name] >= short:
            suspend.remove(name)
            freed -= kept[name]
    cut: dict[str, int] = {}
    missing = short - sum(kept[name] + unused[name] for name in suspend)
    for name in sorted(unused, key=lambda name: (-unused[name], name)):
        if missing > 0 and unused[name] and name not in suspend:
            cut[name] = kept[name]
            missing -= unused[name]
    return GrantPlan(cut, suspend)
