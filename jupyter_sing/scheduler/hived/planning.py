"""Choice of a place for a group with guarantees. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_sing.scheduler.hived.cells import (
    OPPORTUNISTIC,
    AffinityGroup,
    Holding,
    PhysicalCell,
    VirtualCell,
)
from jupyter_sing.scheduler.hived.claiming import claims
from jupyter_sing.scheduler.hived.mapping import Bindings, Favour, Mapper
from jupyter_sing.scheduler.hived.pool import Pool
from jupyter_sing.scheduler.hived.search import Suggested, VirtualSearch, usable


@dataclass(slots=True)
class Plan:
    """Possible placement of a group."""

    places: list[list[VirtualCell]]
    bindings: Bindings
    leaving: int  # groups that would have to leave


class Planner:
    """Finds places for groups, and counts the groups that would have to leave.

    Parameters
    ----------
    pools : mapping of str to Pool
        By the name of their chain.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    def undisturbing(
        self,
        holdings: Sequence[Holding],
        sizes: Sequence[int],
        suggested: Suggested,
        prefer: Sequence[PhysicalCell],
    ) -> Plan | None:
        """Return the guaranteed place for which the fewest opportunistic groups have to leave."""
        best: Plan | None = None
        favour = Favour(prefer)
        for preferred in ([d for d in prefer if not d.busy], prefer):
            for holding in holdings:
                for claimed in self._claims(holding, sizes, suggested, preferred):
                    if best is None or claimed.leaving <= best.leaving:
                        best = claimed
            if best is not None and not best.leaving:
                return best
            for holding in holdings:
                pool = self._pools[holding.chain.name]
                near = [device for device in preferred if device.chain is holding.chain]
                places = VirtualSearch(holding, pool, suggested).find(sizes, OPPORTUNISTIC, near)
                plan = None if places is None else self.plan(pool, places, suggested, favour)
                if plan is not None and not plan.leaving:
                    return plan
                if plan is not None and (best is None or plan.leaving <= best.leaving):
                    best = plan
            if best is None or len(preferred) == len(prefer):
                break  # otherwise a group has to leave anyway: then where it is preferred
        return best

    def _claims(
        self,
        holding: Holding,
        sizes: Sequence[int],
        suggested: Suggested,
        preferred: Sequence[PhysicalCell],
    ) -> Iterator[Plan]:
        """Yield places on just the preferred devices, the best last."""
        if len(sizes) > 1:
            return
        near = [d for d in preferred if d.chain is holding.chain and usable(d, suggested)]
        for start in reversed(range(len(near) - sizes[0] + 1)):
            devices = near[start : start + sizes[0]]
            if any(device.node != devices[0].node for device in devices):
                continue
            found = claims(devices, holding, self._pools[holding.chain.name])
            if found is not None:
                bindings = dict(zip(found, devices, strict=True))
                yield Plan([found], bindings, len(users(devices)))

    def plan(
        self,
        pool: Pool,
        places: list[list[VirtualCell]],
        suggested: Suggested,
        favour: Favour,
    ) -> Plan | None:
        """Map virtual places to physical cells; None if those are bad or cordoned."""
        bindings = Mapper(pool, suggested, favour).map(d for place in places for d in place)
        if bindings is None:
            return None
        return Plan(places, bindings, len(users(bindings.values())))


def users(devices: Iterable[PhysicalCell]) -> dict[AffinityGroup, None]:
    """Return the groups that hold devices (an ordered set)."""
    return {device.user.group: None for device in devices if device.user is not None}
