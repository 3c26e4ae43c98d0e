"""Share of the free devices that cannot be used: fragmentation gradient descent's measure (FGD).

Source: Weng et al., Beware of Fragmentation (USENIX ATC 2023). For a task of class m, the fragment
of a node is all of its free device share that m cannot use: every share, if m does not fit on the
node at all, else those of devices too full for it. The measure is the mean over the classes,
weighted by how often each is requested.

Shares are thousandths of a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

WHOLE = 1000


def fragment(free: int, classes: Sequence[tuple[int, float]]) -> float:
    """Return the number of free devices of a node that are of no use, if only whole ones are given.

    Parameters
    ----------
    free : int
        Free devices.
    classes : sequence of (int, float)
        Devices that a task needs, and its share among the tasks.
    """
    return math.fsum(share * free for gpus, share in classes if gpus > free)
