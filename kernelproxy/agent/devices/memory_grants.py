"""Device memory: the grants of sessions, and plans to make room for one of them. Pure.

Every resident session holds a grant; the grants of a device never exceed its memory. A client
allocates within its grant without asking, and the worker enforces it.

Note [Charges]: a grant covers storages only. On a GPU each worker also has a context, libraries and
cached blocks: its *charge* is what it takes there beyond its grant, at least its context. Processes
that are no workers of this daemon take memory too: they are *outside*. New grants are given only
from what charges and outside processes leave; grants given before stay.
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
    physical : int
        Bytes of the device from which grants, charges and outside processes take theirs; 0: there
        are only grants.
    """

    def __init__(self, total: int, step: int, physical: int = 0) -> None:
        self.total, self.step, self.physical = total, step, physical
        #: Bytes that processes take which are no workers.
        self.outside = 0
        self._grants: dict[str, int] = {}
        self._charges: dict[str, int] = {}

    @property
    def granted(self) -> int:
        """Bytes granted to all sessions together."""
        return sum(self._grants.values())

    @property
    def free(self) -> int:
        """Bytes that can be granted."""
        return max(0, self._free)

    @property
    def _free(self) -> int:
        """The same; below 0 if more is in use than there is."""
        left = self.total - self.granted
        if not self.physical:
            return left
        taken = self.granted + sum(self._charges.values()) + self.outside
        return min(left, self.physical - taken)

    def most(self, session: str) -> int:
        """Return the bytes that a session could have if no other session had any."""
        if not self.physical:
            return self.total
        taken = self.outside + self._charges.get(session, 0)
        return max(0, min(self.total, self.physical - taken))

    def charge(self, session: str, beside: int) -> None:
        """Set what a session's worker takes beyond its grant; see Note [Charges]."""
        self._charges[session] = beside

    def of(self, session: str) -> int:
        """Return the bytes granted to a session."""
        return self._grants.get(session, 0)

    def short(self, session: str, need: int) -> int:
        """Return the bytes missing for a session to hold `need`; 0 if there is room."""
        more = need - self.of(session)
        return max(0, more - self._free) if more > 0 else 0

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
        left = self.total - self.granted
        if grant < 0 or grant - self.of(session) > left:
            raise InternalError(f"{grant} bytes were granted where {left} are left")
        self._grants[session] = grant

    def release(self, session: str) -> None:
        """Take a session's grant back, and its charge: it has no worker. Idempotent."""
        self._grants.pop(session, None)
        self._charges.pop(session, None)


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
    cached : int
        Bytes beyond its grant that its worker could give back; see Note [Charges].
    context : int
        Bytes beyond its grant that are free only when its worker ends.
    """

    session: str
    granted: int
    used: int
    idle_since: float | None
    cached: int = 0
    context: int = 0


@dataclass(frozen=True)
class GrantPlan:
    """Plan to make room: grants to cut to a new size, and sessions to suspend, in order.

    Sessions in `cut` also give back their caches.
    """

    cut: dict[str, int] = field(default_factory=dict)
    suspend: list[str] = field(default_factory=list)


def plan_room(short: int, neighbours: Sequence[Neighbour]) -> GrantPlan | None:
    """Return the way to free `short` bytes that disturbs other sessions least.

    Unused grants and caches are cut first, the largest first, because that costs least. Then idle
    neighbours are suspended, the longest idle first, and no more of them than needed.

    Returns
    -------
    GrantPlan or None
        None if there is no way: then no session should be disturbed.
    """
    if short <= 0:
        return GrantPlan()
    kept = {each.session: min(each.granted, each.used) for each in neighbours}
    unused = {e.session: e.granted + e.cached - kept[e.session] for e in neighbours}
    ends = {each.session: kept[each.session] + each.context for each in neighbours}
    idle = {each.session: each.idle_since for each in neighbours if each.idle_since is not None}
    suspend: list[str] = []
    freed = sum(unused.values())
    for name in sorted(idle, key=lambda name: (idle[name], name)):
        if freed >= short:
            break
        if ends[name]:
            suspend.append(name)
            freed += ends[name]
    if freed < short:
        return None
    # A later victim may be so large that an earlier one can stay.
    for name in list(suspend):
        if freed - ends[name] >= short:
            suspend.remove(name)
            freed -= ends[name]
    cut: dict[str, int] = {}
    missing = short - sum(ends[name] + unused[name] for name in suspend)
    for name in sorted(unused, key=lambda name: (-unused[name], name)):
        if missing > 0 and unused[name] and name not in suspend:
            cut[name] = kept[name]
            missing -= unused[name]
    return GrantPlan(cut, suspend)
