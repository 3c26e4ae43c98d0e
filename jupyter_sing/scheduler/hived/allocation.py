"""A cluster, and the groups in it: which groups get which cells, and which are preempted for that.

The rules are HiveD's. A group with a priority of 0 or more is placed in the cells that its virtual
cluster is guaranteed, as if those were a cluster of their own, and then mapped to physical cells.
So other virtual clusters cannot disturb it, and the safety of the pool makes the mapping possible.
An opportunistic group takes unheld devices, and is preempted when a guarantee needs them.

Preemption has a state, so that two preemptors never wait for each other: the devices are reserved
at once, and the preemptor gets them when its victims were released. Until then a group with a
higher priority may cancel the preemption; the reserved devices then belong to the victims again.
"""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_sing.scheduler.hived.cells import (
    AffinityGroup,
    GroupRequest,
    GroupState,
    GroupWaiting,
    Holding,
    PhysicalCell,
    Placed,
    Reserved,
    VirtualCell,
)
from jupyter_sing.scheduler.hived.config.configuration import Chain, Configuration
from jupyter_sing.scheduler.hived.config.layout import Layout
from jupyter_sing.scheduler.hived.errors import HivedInternalError, RequestError
from jupyter_sing.scheduler.hived.mapping import Favour
from jupyter_sing.scheduler.hived.planning import Plan, Planner, users
from jupyter_sing.scheduler.hived.search import Suggested, VirtualSearch, find_unused, usable
from jupyter_sing.scheduler.hived.seating import Seating

Outcome = Placed | Reserved | GroupWaiting


class HivedCluster(Layout):
    """Cells of a configuration, and the groups that hold them.

    Every call is complete when it returns, and one that is refused or has to wait changes nothing.
    The same calls give the same answers.

    Attributes
    ----------
    groups
        Those that hold or have reserved devices, in the order of their arrival.
    """

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.groups: dict[str, AffinityGroup] = {}
        self._planner, self.seating = Planner(self.pools), Seating(self.pools)

    def schedule(
        self,
        request: GroupRequest,
        suggested: Suggested = None,
        *,
        preempt: bool = True,
        prefer: Sequence[PhysicalCell] = (),
    ) -> Outcome:
        """Place a group, or reserve a place for it.

        Parameters
        ----------
        request
            Request of a group that holds nothing, or that has a reservation. A reservation turns
            into its place as soon as no other group is there, and is made anew if it has become
            unusable.
        suggested
            Names of the nodes that are not cordoned; None: all.
        preempt
            True if other groups may have to leave; otherwise it waits.
        prefer
            Devices to be used if that costs no guarantee and displaces no group, best first.

        Raises
        ------
        RequestError
            If the request could never be served as it stands, or the group has its place.
        """
        holdings = self._check(request)
        if request.ignore_suggested:
            suggested = None
        group = self.groups.get(request.name)
        if group is not None:
            if not group.preempting:
                raise RequestError(f"{request.name} has its place already.")
            if not preempt or all(usable(seat.physical, suggested) for seat in group.seats):
                return self._continued(group)
            self.cancel(request.name)
        sizes = sorted((m.leaves for m in request.members for _ in range(m.pods)), reverse=True)
        if not request.guaranteed:
            return self._opportunistic(request, sizes, suggested, prefer)
        if not holdings:
            return GroupWaiting(f"{request.vc} is promised no such devices.")
        if prefer:
            chains = {device.chain.name: None for device in prefer}
            holdings.sort(key=lambda holding: holding.chain.name not in chains)
        plan = self._planner.undisturbing(holdings, sizes, suggested, prefer)
        if plan is not None:
            if plan.leaving and not preempt:
                return GroupWaiting(f"{plan.leaving} opportunistic groups would have to leave.")
            return self._commit(request, plan, [])
        return self._disturbing(request, holdings, sizes, suggested, preempt=preempt)

    def release(self, name: str) -> None:
        """Release what a group holds; a group that has reserved it gets it.

        Raises
        ------
        RequestError
            If there is no such group.
        """
        group = self._group(name)
        if group.preempting:
            self.cancel(name)
            return
        for seat in group.seats:
            seat.physical.user = None
            if seat.physical.reserver is None:
                self.seating.leave(seat)
        del self.groups[name]

    def cancel(self, name: str) -> None:
        """Cancel a reservation: its victims stay, with the rights they had.

        Raises
        ------
        RequestError
            If the group has no reservation.
        """
        group = self._group(name)
        if not group.preempting:
            raise RequestError(f"{name} has its place, and no reservation.")
        self._cancel(group)
        self._restore(group.downgraded)

    def state(self, name: str) -> GroupState:
        """Return the state of a group; an unknown one is pending."""
        group = self.groups.get(name)
        return GroupState.PENDING if group is None else group.state

    def adopt(self, group: AffinityGroup) -> None:
        """Assign its seats, which are free, to a group."""
        for seat in group.seats:
            seat.physical.user = seat
            self.seating.sit(seat)
        self.groups[group.request.name] = group

    def _check(self, request: GroupRequest) -> list[Holding]:
        """Return where a request may be placed, in the order of the search."""
        request.check()
        vc = self.virtual_cluster(request.vc)
        if request.pinned is not None:
            if request.pinned not in vc.pinned:
                raise RequestError(f"{request.vc} has no pinned cell {request.pinned!r}.")
            return [vc.pinned[request.pinned]]
        chains = self._chains_for(request)
        if not chains:
            raise RequestError(f"There are no devices of type {request.leaf_type!r}.")
        holdings = [vc.holdings[chain.name] for chain in chains if chain.name in vc.holdings]
        if request.guaranteed and request.leaf_type is not None and not holdings:
            raise RequestError(
                f"{request.vc} is promised no devices of type {request.leaf_type!r}."
            )
        if request.any_pinned:
            holdings += [h for h in vc.pinned.values() if h.chain in chains]
        return holdings

    def _group(self, name: str) -> AffinityGroup:
        if name not in self.groups:
            raise RequestError(f"{name} holds nothing.")
        return self.groups[name]

    def _continued(self, group: AffinityGroup) -> Outcome:
        victims = users(seat.physical for seat in group.seats)
        if victims:
            return Reserved(group, tuple(victims))
        for seat in group.seats:
            seat.physical.reserver = None
            seat.physical.user = seat
        group.preempting = False
        group.downgraded = []
        return Placed(group)

    def _opportunistic(
        self,
        request: GroupRequest,
        sizes: Sequence[int],
        suggested: Suggested,
        prefer: Sequence[PhysicalCell],
    ) -> Outcome:
        for chain in _nearest_first(self._chains_for(request), prefer):
            near = [device for device in prefer if device.chain is chain]
            places = find_unused(
                self._nodes[chain.name], sizes, suggested, near, self._node_of.__getitem__
            )
            if places is not None:
                group = AffinityGroup(
                    request, [[(device, None) for device in place] for place in places]
                )
                self.adopt(group)
                return Placed(group)
        return GroupWaiting("There are not enough free devices together.")

    def _disturbing(
        self,
        request: GroupRequest,
        holdings: Sequence[Holding],
        sizes: Sequence[int],
        suggested: Suggested,
        *,
        preempt: bool,
    ) -> Outcome:
        """Preempt groups of the same virtual cluster that have lower priorities."""
        reason = f"What {request.vc} is promised is held by others of the same or higher priority."
        largest = max(node.leaves for holding in holdings for node in holding.nodes)
        if sizes[0] > largest:
            reason = f"{request.vc} is promised no {sizes[0]} devices together; {largest} at most."
        for holding in holdings:
            pool = self.pools[holding.chain.name]
            places = VirtualSearch(holding, pool, suggested).find(sizes, request.priority, ())
            if places is None:
                continue
            downgraded = self._downgraded(places)
            plan = self._planner.plan(pool, places, suggested, Favour(()))
            if plan is not None and (preempt or not plan.leaving):
                return self._commit(request, plan, downgraded)
            for group, virtuals in reversed(downgraded):
                if not self.seating.upgrade(group, virtuals):
                    raise HivedInternalError(
                        f"{group.request.name} could not get back what it had."
                    )
            reason = "Bad or cordoned nodes would be needed." if plan is None else "Others hold it."
        return GroupWaiting(reason)

    def _downgraded(
        self, places: Sequence[Sequence[VirtualCell]]
    ) -> list[tuple[AffinityGroup, list[VirtualCell]]]:
        """Make the holders of these devices opportunistic if they allow it (lazy preemption)."""
        downgraded = []
        for place in places:
            for device in place:
                physical = device.physical
                if physical is None or physical.user is None or physical.reserver is not None:
                    continue
                group = physical.user.group
                if group.request.lazy_preemption and group.state is GroupState.ALLOCATED:
                    downgraded.append((group, self.seating.downgrade(group)))
        return downgraded

    def _commit(
        self,
        request: GroupRequest,
        plan: Plan,
        downgraded: list[tuple[AffinityGroup, list[VirtualCell]]],
    ) -> Outcome:
        overtaken: dict[AffinityGroup, None] = {}
        for physical in plan.bindings.values():
            if physical.reserver is not None:
                overtaken[physical.reserver.group] = None
        lost = tuple(group.request.name for group, _ in downgraded)
        inherited: list[tuple[AffinityGroup, list[VirtualCell]]] = []
        for group in overtaken:
            self._cancel(group)
            inherited += group.downgraded
        places = [[(plan.bindings[v], v) for v in place] for place in plan.places]
        group = AffinityGroup(request, places)
        cancelled = tuple(other.request.name for other in overtaken)
        victims = users(seat.physical for seat in group.seats)
        if not victims:
            self.adopt(group)
            self._restore(inherited)
            return Placed(group, cancelled, lost)
        for seat in group.seats:
            if seat.physical.user is not None:
                self.seating.leave(seat.physical.user)
        for seat in group.seats:
            seat.physical.reserver = seat
            self.seating.sit(seat)
        group.preempting = True
        group.downgraded = inherited + downgraded
        self.groups[request.name] = group
        self._restore(inherited)
        return Reserved(group, tuple(victims), cancelled, lost)

    def _cancel(self, group: AffinityGroup) -> None:
        """End a reservation; downgraded groups stay so."""
        for seat in group.seats:
            self.seating.leave(seat)
            seat.physical.reserver = None
        for seat in group.seats:
            if seat.physical.user is not None:
                self.seating.sit(seat.physical.user)
        del self.groups[group.request.name]

    def _restore(self, downgraded: Sequence[tuple[AffinityGroup, list[VirtualCell]]]) -> None:
        """Give groups their guarantees back, as far as those are not held by other groups now."""
        for group, virtuals in downgraded:
            known = self.groups.get(group.request.name) is group
            if known and group.state is GroupState.ALLOCATED and not group.guaranteed:
                self.seating.upgrade(group, virtuals)

    def _chains_for(self, request: GroupRequest) -> list[Chain]:
        return [
            chain
            for chain in self.configuration.chains
            if request.leaf_type in (None, chain.leaf_type)
        ]


def _nearest_first(chains: Sequence[Chain], prefer: Sequence[PhysicalCell]) -> list[Chain]:
    preferred = {device.chain.name: None for device in prefer}
    return sorted(chains, key=lambda chain: chain.name not in preferred)
