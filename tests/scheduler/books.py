"""Consistency checks of a cluster, computed from scratch, without trusting any counter."""

from __future__ import annotations

from collections import Counter

from jupyter_sing.scheduler.hived import CellState, GroupState, HivedCluster
from jupyter_sing.scheduler.hived.cells import Holding, PhysicalCell, VirtualCell
from jupyter_sing.scheduler.hived.pool import Pool


def check(cluster: HivedCluster) -> None:
    """Assert that the cluster's state is consistent."""
    for pool in cluster.pools.values():
        _check_pool(cluster, pool)
    for vc in cluster.virtual_clusters.values():
        for holding in vc.all_holdings:
            _check_holding(holding)
    for device in cluster.devices.values():
        _check_device(device)
    for group in cluster.groups.values():
        states = {seat.physical.state for seat in group.seats}
        if group.state is GroupState.PREEMPTING:
            assert states <= {CellState.RESERVING, CellState.RESERVED}
            assert CellState.RESERVING in states or all(
                seat.physical.user is None for seat in group.seats
            )
            assert all(seat.physical.reserver is seat for seat in group.seats)
        else:
            assert states <= {CellState.USED, CellState.RESERVING}
            assert all(seat.physical.user is seat for seat in group.seats)
            reserved = CellState.RESERVING in states
            assert (group.state is GroupState.BEING_PREEMPTED) == reserved
        rights = {seat.virtual is not None for seat in group.seats}
        assert len(rights) <= 1, "a group holds all of its devices by one right"


def pictured(cluster: HivedCluster) -> object:
    """Return the state of a cluster as a value: equal values behave the same in all later calls."""
    return (
        [
            (chain, [[c.order for c in cells] for cells in pool.free], pool.left, pool.need,
             pool.surplus, pool.bad)
            for chain, pool in cluster.pools.items()
        ],
        [
            (name, d.state, d.bad, sorted(d.used.items()), d.virtual and d.virtual.order,
             d.user and d.user.group.request.name, d.reserver and d.reserver.group.request.name)
            for name, d in cluster.devices.items()
        ],
        [
            (vc.name, holding.unbound, holding.busy, sorted(holding.used.items()),
             [root.physical and root.physical.order for root in holding.roots])
            for vc in cluster.virtual_clusters.values() for holding in vc.all_holdings
        ],
        [(name, group.state, group.guaranteed) for name, group in cluster.groups.items()],
    )  # fmt: skip


def _inside(cell: PhysicalCell) -> list[PhysicalCell]:
    return [cell, *(c for child in cell.children for c in _inside(child))]


def _parts(cell: VirtualCell) -> list[VirtualCell]:
    return [cell, *(c for child in cell.children for c in _parts(child))]


def _check_pool(cluster: HivedCluster, pool: Pool) -> None:
    levels = range(1, pool.chain.top + 1)
    cells = [cell for root in pool.roots for cell in _inside(root)]
    holdings = [
        holding
        for vc in cluster.virtual_clusters.values()
        for holding in vc.holdings.values()
        if holding.chain is pool.chain
    ]
    listed = {cell: None for free in pool.free for cell in free}
    assert all(cells == sorted(cells, key=lambda c: c.order) for cells in pool.free)
    assert len(listed) == sum(map(len, pool.free))
    for cell in cells:
        # Of every path down from a root, the first cell that is not split is free or taken.
        outer = cell.parent
        reached = outer is None or outer.split
        assert (cell in listed) == (reached and not cell.split and not cell.taken)
        assert not (cell.split and cell.taken)
        if cell.split:
            assert all(c.split or c.taken or c in listed for c in cell.children)
            # Buddies that are all free have been merged.
            assert any(c.split or c.taken for c in cell.children)
        elif not reached:
            assert not cell.taken
        claimed = cell.virtual is not None and cell.virtual.parent is None
        assert cell.taken == claimed
        assert cell.bad == sum(device.bad for device in cell.devices)
        if cell.children:
            assert cell.busy == sum(child.busy for child in cell.children)
            total: Counter[int] = Counter()
            for child in cell.children:
                total.update(child.used)
            assert cell.used == dict(total)
        if cell.virtual is not None:
            assert cell.virtual.physical is cell
            assert cell.virtual.level == cell.level
            if cell.virtual.parent is not None:
                assert cell.parent is not None
                assert cell.parent.virtual is cell.virtual.parent
    surplus = 0
    for level in levels[::-1]:
        shape = pool.chain.levels[level - 1]
        left = sum(cell.leaves // shape.leaves for free in pool.free[level - 1 :] for cell in free)
        need = sum(
            root.level == level and root.physical is None
            for holding in holdings
            for root in holding.roots
        )
        assert pool.left[level - 1] == left
        assert pool.need[level - 1] == need
        assert left >= need, "totalLeft >= allVCFree"
        above = pool.chain.levels[level].fanout if level < pool.chain.top else 0
        surplus = len(pool.free[level - 1]) - need + surplus * above
        assert pool.surplus[level - 1] == surplus >= 0
    assert pool.bad == sum(root.bad for root in pool.roots)


def _check_holding(holding: Holding) -> None:
    total: Counter[int] = Counter()
    for root in holding.roots:
        total.update(root.used)
        for cell in _parts(root):
            if cell.physical is not None:
                assert cell.physical.virtual is cell
            assert (cell.physical is not None) == (cell.busy > 0 or cell.fixed)
            assert cell.busy == sum(device.busy for device in cell.devices)
            assert cell.busy == sum(cell.used.values())
    assert holding.used == dict(total)
    assert holding.busy == sum(total.values())
    for level in range(1, holding.chain.top + 1):
        assert holding.unbound[level - 1] == sum(
            root.level == level and root.physical is None for root in holding.roots
        )


def _check_device(device: PhysicalCell) -> None:
    holder = device.reserver or device.user
    assert device.busy == (holder is not None)
    if holder is None:
        assert device.virtual is None or device.virtual.fixed
        return
    assert holder.physical is device
    assert device.used == {holder.priority: 1}
    assert device.virtual is holder.virtual
    if device.reserver is not None and device.user is not None:
        assert device.user.priority < device.reserver.priority
