"""Guarantees by which given devices could be held: the way back from physical to virtual cells."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_sing.scheduler.hived.cells import Holding, PhysicalCell, VirtualCell
from jupyter_sing.scheduler.hived.pool import Pool


def claims(
    devices: Sequence[PhysicalCell],
    holding: Holding,
    pool: Pool,
    levels: Sequence[int] | None = None,
) -> list[VirtualCell] | None:
    """Find guaranteed devices that could be bound to just these physical ones.

    Parameters
    ----------
    devices
        Different ones; opportunistic groups may hold them.
    levels
        For each device, level of the guaranteed cell that may be newly bound; None: any.

    Returns
    -------
    list of VirtualCell or None
        In the order of the devices; None if a guarantee does not allow all of them.
    """
    planned: dict[PhysicalCell, VirtualCell] = {}
    used: dict[VirtualCell, None] = {}
    taken: list[PhysicalCell] = []
    found = []
    try:
        for number, device in enumerate(devices):
            path: list[PhysicalCell] = []
            virtual: VirtualCell | None = None
            for cell in device.ancestors():
                virtual = cell.virtual or planned.get(cell)
                if virtual is not None:
                    break
                path.append(cell)
            if virtual is None:
                level = None if levels is None else levels[number]
                choice = _new_root(path, holding, pool, level, used, devices)
                if choice is None:
                    return None
                cell, virtual = choice
                pool.take(cell)  # so that the next device finds what is left
                taken.append(cell)
                planned[cell] = virtual
                used[virtual] = None
                path = path[: path.index(cell)]
            elif virtual.holding is not holding or not path:
                return None
            for cell in reversed(path):
                virtual = next(
                    (c for c in virtual.children if c.physical is None and c not in used), None
                )
                if virtual is None:
                    return None
                planned[cell] = virtual
                used[virtual] = None
            found.append(virtual)
    finally:
        for cell in reversed(taken):
            pool.give(cell)
    return found


def _new_root(
    path: Sequence[PhysicalCell],
    holding: Holding,
    pool: Pool,
    level: int | None,
    used: dict[VirtualCell, None],
    devices: Sequence[PhysicalCell],
) -> tuple[PhysicalCell, VirtualCell] | None:
    """Return a guaranteed cell to bind to one of these cells: the smallest with most devices."""
    options: list[tuple[PhysicalCell, VirtualCell]] = []
    for cell in path:
        if not holding.unbound[cell.level - 1] or level not in (None, cell.level):
            continue
        root = next(
            (
                root
                for root in holding.roots
                if root.level == cell.level and root.physical is None and root not in used
            ),
            None,
        )
        if root is not None and pool.may_take(cell):
            options.append((cell, root))
    return max(
        options,
        key=lambda option: (sum(d in option[0].devices for d in devices), -option[0].level),
        default=None,
    )
