"""Random notebook workloads, fitted to published data about real ones.

There are two sources, as neither is complete:

- *Adobe* (NotebookOS, its June file of 100,131 bursts): training cells of a minute to days and the
  gaps between them. Bursts below a minute were dropped there.
- *JuNE* (20 developers, 9,207 executions): cells and think times of seconds. Not about GPUs.

So a session is a chain of Adobe-like training cells, and the gaps before them contain JuNE-like
edit-run bursts, with as many cells as requested. Days, nights and weekends are not modelled:
nothing is published about them, and a session begins at any hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random

from jupyter_sing.simulator.quantiles import (
    Quantiles,
    lognormal,
    lognormal_of,
    normal,
    sample,
    strata,
)
from jupyter_sing.simulator.week import Placed, parted, placed
from jupyter_sing.simulator.workload import GB, MINUTE, Cell, SimulatedSession, Workload, arranged

DAY = 86_400.0

# Minutes. Published are the quantiles 50, 75, 90, 95 and 99 %; the ends are assumed. The source
# counts whole minutes, so that one may be half of one; cells of days are known, gaps of more than
# half a day are not within a session.
TRAINING = Quantiles(
    ((0, 0.5), (0.5, 2), (0.75, 6), (0.9, 20), (0.95, 40), (0.99, 220), (0.999, 1440), (1, 2880))
)
GAPS = Quantiles(((0, 0.1), (0.5, 1), (0.75, 3), (0.9, 7), (0.95, 15), (0.99, 563), (1, 720)))
# Seconds.
QUICK = lognormal(median=0.8, sigma=2.0)
QUICK_THINK = lognormal_of(mean=12.0, deviation=20.0)
QUICK_GAP_MAX = 1800.0  # of a longer gap, only this much is work in the notebook
# Chains of cells per session: some chains become two sessions.
_CHAINS = 0.75
_WORK_MAX = 0.9  # of the available time, for the training cells of one chain


@dataclass(frozen=True)
class Parameters:
    """Parameters of a generated workload.

    Parameters
    ----------
    sessions : int
        Of one device each.
    training : int
        Training cells, of all sessions together; at least one each.
    quick : int
        Cells of edit-run bursts, of all sessions together.
    days : float
        From the first submission to the last end, if no cell ever waited.
    load : float or None
        Devices that are busy on average over `days`, if no cell ever waited. All training cells
        are made shorter or longer by the same factor to meet it: the published quantiles are of
        sessions with 1 to 8 GPUs, whose cells last 17 minutes on average, while the pilot's, of
        one GPU, last 7. None takes the quantiles as they are.
    likeness : float
        Correlation, from 0 to 1, of how long the cells of a session are (on a normal scale): some
        users always train for long. Assumed.
    memory : float
        Median of the lognormal working sets, in bytes.
    memory_sigma : float
    memory_max : float
        Upper limit of the working sets.
    """

    sessions: int = 71
    training: int = 7581
    quick: int = 0
    days: float = 7.0
    load: float | None = 5.25
    likeness: float = 0.5
    memory: float = 8.0 * GB
    memory_sigma: float = 0.5
    memory_max: float = 22.0 * GB


PILOT = Parameters()
PILOT_WITH_BURSTS = Parameters(quick=63_500)


def generate(parameters: Parameters = PILOT, seed: int = 0) -> Workload:
    """Generate a workload: the same parameters and seed give the same workload.

    Raises
    ------
    ValueError
        There are fewer training cells than sessions, or they cannot meet the load.
    """
    p, random = parameters, Random(seed)
    if not 0 < p.sessions <= p.training:
        raise ValueError("Each session needs a training cell.")
    chains = math.ceil(_CHAINS * p.sessions)
    counts = _apportioned(sample(lognormal(1.0, 0.8), chains, random), p.training)
    quick = sample(QUICK, p.quick, random)
    thinks = sample(QUICK_THINK, p.quick, random)
    training = _training(_alike(counts, p.likeness, random), p, math.fsum(quick))
    _ease(training, counts, _WORK_MAX * p.days * DAY)
    gaps = [MINUTE * gap for gap in sample(GAPS.value, p.training, random)]
    bursts = _bursts(gaps, p.quick)
    begins = sample(lambda position: position, chains, random)
    found: list[list[Placed]] = []
    first = used = 0
    for count, begin in zip(counts, begins, strict=True):
        cells: list[Cell] = []
        for i in range(first, first + count):
            burst = slice(used, used + bursts[i])
            used += bursts[i]
            cells += _chain(gaps[i], training[i], quick[burst], thinks[burst])
        first += count
        found += placed(cells, p.days * DAY, begin)
    parts = parted(found, p.sessions)
    memories = sample(lognormal(p.memory, p.memory_sigma), len(parts), random)
    digits = len(str(p.sessions - 1))
    return arranged(
        SimulatedSession(f"notebook{i:0{digits}}", 1, int(min(memory, p.memory_max)), _cells(part))
        for i, (part, memory) in enumerate(zip(parts, memories, strict=True))
    )


def _alike(counts: Sequence[int], likeness: float, random: Random) -> list[float]:
    """Return the positions of cells in their distribution, similar ones within a chain."""
    own, common = math.sqrt(1 - likeness), math.sqrt(likeness)
    scores = []
    for count in counts:
        chain = common * normal(random)
        scores += [chain + own * normal(random) for _ in range(count)]
    order = sorted(range(len(scores)), key=scores.__getitem__)
    positions = [0.0] * len(scores)
    for index, position in zip(order, strata(len(scores), random), strict=True):
        positions[index] = position
    return positions


def _training(positions: Sequence[float], p: Parameters, quick: float) -> list[float]:
    """Return the training cells' seconds, scaled to the load."""
    seconds = [MINUTE * TRAINING.value(position) for position in positions]
    if p.load is None:
        return seconds
    factor = (p.load * p.days * DAY - quick) / math.fsum(seconds)
    if factor <= 0:
        raise ValueError(f"The bursts alone are more than a load of {p.load:g}.")
    return [factor * each for each in seconds]


def _ease(training: list[float], counts: Sequence[int], work_max: float) -> None:
    """Swap the longest cells of overlong chains for the shortest cells of the least busy."""
    edges = [0, *accumulate(counts)]
    chains = [range(a, b) for a, b in pairwise(edges)]
    works = [math.fsum(training[i] for i in chain) for chain in chains]
    while (most := max(works)) > work_max:
        full, idle = works.index(most), works.index(min(works))
        i = max(chains[full], key=training.__getitem__)
        j = min(chains[idle], key=training.__getitem__)
        change = training[i] - training[j]
        if works[idle] + change >= most:
            raise ValueError("So few sessions cannot compute so much in that time.")
        training[i], training[j] = training[j], training[i]
        works[full] -= change
        works[idle] += change


def _apportioned(weights: Sequence[float], total: int) -> list[int]:
    """Divide a total in proportion to weights: at least one each, and the sum exact."""
    free, whole = total - len(weights), math.fsum(weights)
    edges = [round(free * part / whole) for part in accumulate(weights)]
    edges[-1] = free
    return [1 + b - a for a, b in pairwise([0, *edges])]


def _bursts(gaps: Sequence[float], total: int) -> list[int]:
    """Return the number of quick cells per gap, in proportion to its time that is not absence."""
    shares = list(accumulate(min(gap, QUICK_GAP_MAX) for gap in gaps))
    edges = [round(total * share / shares[-1]) for share in shares]
    return [b - a for a, b in pairwise([0, *edges])]


def _chain(
    gap: float, training: float, quick: Sequence[float], thinks: Sequence[float]
) -> list[Cell]:
    """Return a gap's burst and the training cell after it.

    The part of the gap that the burst does not fill is the pause before it; a burst that is longer
    than its gap makes the gap longer.
    """
    pause = max(0.0, gap - math.fsum(quick) - math.fsum(thinks))
    return [
        Cell(think, duration)
        for think, duration in zip([pause, *thinks], [*quick, training], strict=True)
    ]


def _cells(part: Sequence[Placed]) -> tuple[Cell, ...]:
    ends = [0.0, *(start + duration for start, duration in part)]
    return tuple(
        Cell(max(0.0, start - end), duration)
        for (start, duration), end in zip(part, ends, strict=False)
    )
