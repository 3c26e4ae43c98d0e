"""How much of what is free cannot be used: the measure of fragmentation gradient descent (FGD).

Source: Weng et al., Beware of Fragmentation (USENIX ATC 2023). For a task of class m, the fragment
of a node is all of its free device share that m cannot use: every share, if m does not fit on the
node at all, else those of devices too full for it. The measure is the mean over the classes,
weighted by how often each is asked for.

Shares are thousandths of a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WHOLE = 1000


def fragment(free: int, classes: Sequence[tuple[int, float]]) -> float:
    """Return the devices of a node that are free and of no use, where only whole ones are given.

    Parameters
    ----------
    free : int
        Free devices.
    classes : sequence of (int, float)
        Devices that a task needs, and its share among the tasks.
    """
    return math.fsum(share * free for gpus, share in classes if gpus > free)


def node_fragment(remainders: Sequence[int], classes: Sequence[tuple[int, int, float]]) -> float:
    """Return the free share of a node's devices that tasks cannot use.

    Parameters
    ----------
    remainders : sequence of int
        Free thousandths of each device.
    classes : sequence of (int, int, float)
        Devices that a task needs, thousandths of each, and its share among the tasks.
    """
    total = sum(remainders)
    measure = 0.0
    for gpus, share, popularity in classes:
        usable = [rest for rest in remainders if rest >= share]
        measure += popularity * (total if len(usable) < gpus else total - sum(usable))
    return measure
