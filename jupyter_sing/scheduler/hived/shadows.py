"""Guaranteed cells that could only be bound to bad hardware.

A guaranteed cell that is bound to nothing has no hardware; but if a virtual cluster is owed more
cells of a level than free ones without bad devices are left, then the last of them are *doomed*.
This module assigns each the damaged cell that it would get, so that nothing is planned on devices
that do not work and users can see what their guarantee is worth today. Other virtual clusters are
not taken into account: good cells go first come, first served.

Nothing of this is stored: it follows from the holders and the bad devices (HiveD binds doomed cells
and has to unbind them at each change).
"""

from __future__ import annotations

from jupyter_sing.scheduler.hived.cells import Holding, PhysicalCell, VirtualCell
from jupyter_sing.scheduler.hived.pool import Pool

Shadows = dict[VirtualCell, PhysicalCell]


def shadows(holding: Holding, pool: Pool) -> Shadows:
    """Find the damaged physical cells that unbound guaranteed cells would get.

    Returns
    -------
    dict
        From unbound virtual cells, of any level, to cells with bad devices; virtual cells that are
        not in it can get cells without bad devices.
    """
    found: Shadows = {}
    if not pool.bad:
        return found
    for level in range(1, holding.chain.top + 1):
        owed = holding.unbound[level - 1]
        if not owed:
            continue
        damaged = pool.damaged(level)
        doomed = owed - (pool.left[level - 1] - len(damaged))
        if doomed > 0:
            unbound = [r for r in holding.roots if r.level == level and r.physical is None]
            for root, cell in zip(unbound[-doomed:], damaged, strict=False):
                _cast(root, cell, found)
    for root in holding.roots:
        if root.physical is not None and root.physical.bad:
            _cast_inside(root, root.physical, found)
    return found


def _cast(virtual: VirtualCell, physical: PhysicalCell, found: Shadows) -> None:
    found[virtual] = physical
    _cast_inside(virtual, physical, found)


def _cast_inside(virtual: VirtualCell, physical: PhysicalCell, found: Shadows) -> None:
    """Pair the unbound cells inside with the physical ones that are left, the damaged ones last."""
    for child in virtual.children:
        if child.physical is not None and child.physical.bad:
            _cast_inside(child, child.physical, found)
    virtuals = [child for child in virtual.children if child.physical is None]
    physicals = sorted(
        (child for child in physical.children if child.virtual is None),
        key=lambda cell: (cell.bad, cell.order),
    )
    for child, cell in zip(virtuals, physicals, strict=True):
        if cell.bad:
            _cast(child, cell, found)
