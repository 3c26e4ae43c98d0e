"""Packing of requests for fractions of devices onto nodes, and the share that is left over.

The experiment of FGD (Weng et al., USENIX ATC 2023): requests arrive until the devices cannot take
any more. What is then free, and could not be given, is the price of the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_sing.simulator.fragmentation import WHOLE
from jupyter_sing.simulator.openb import Pod

Remainders: TypeAlias = tuple[int, ...]
"""Free thousandths of each device of a node, sorted: devices are interchangeable."""
Classes: TypeAlias = Sequence[tuple[int, int, float]]
Rule: TypeAlias = Callable[[Remainders, Remainders, Classes], float]
"""Cost of changing a node from the first state to the second; the lowest is taken."""


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


@dataclass(frozen=True)
class SharingResult:
    """Result of the packing; shares of the devices.

    Parameters
    ----------
    placed, refused : int
        Number of requests.
    allocated : float
    fragmented : float
        Free, and of no use to such requests (FGD's measure).
    """

    placed: int
    refused: int
    allocated: float
    fragmented: float


def steepest(before: Remainders, after: Remainders, classes: Classes) -> float:
    """Rule of FGD: the least growth of fragmentation."""
    return node_fragment(after, classes) - node_fragment(before, classes)


def best_fit(before: Remainders, after: Remainders, classes: Classes) -> float:
    """Rule of best fit: the node with the least left."""
    return float(sum(after))


def worst_fit(before: Remainders, after: Remainders, classes: Classes) -> float:
    """Rule of worst fit, or load balancing: the node with the most left."""
    return -float(sum(after))


RULES: dict[str, Rule] = {"fgd": steepest, "best-fit": best_fit, "worst-fit": worst_fit}


def classes_of(pods: Sequence[Pod]) -> list[tuple[int, int, float]]:
    """Return the shapes of pods, and how often each occurs."""
    counts = Counter((pod.gpus, pod.share) for pod in pods)
    return [(gpus, share, count / len(pods)) for (gpus, share), count in sorted(counts.items())]


def pack(pods: Sequence[Pod], nodes: Sequence[int], rule: Rule) -> SharingResult:
    """Place requests one after the other; none ever leaves.

    Parameters
    ----------
    pods : sequence of Pod
    nodes : sequence of int
        Number of devices of each node.
    rule : callable
        One of `RULES`. Of nodes with the same cost the one in the lowest state is taken.
    """
    classes = classes_of(pods)
    # Nodes in the same state are interchangeable: there are far fewer states than nodes.
    states = Counter((WHOLE,) * gpus for gpus in nodes if gpus)
    choices: dict[tuple[Remainders, int, int], tuple[float, Remainders] | None] = {}
    placed, free = 0, WHOLE * sum(nodes)
    for pod in pods:
        options = []
        for state in states:
            key = state, pod.gpus, pod.share
            if key not in choices:
                choices[key] = _choice(state, pod, rule, classes)
            choice = choices[key]
            if choice is not None:
                options.append((choice[0], state, choice[1]))
        if not options:
            continue
        _, before, after = min(options)
        states[before] -= 1
        if not states[before]:
            del states[before]
        states[after] += 1
        placed += 1
        free -= pod.gpus * pod.share
    total = WHOLE * sum(nodes)
    lost = sum(count * node_fragment(state, classes) for state, count in states.items())
    return SharingResult(placed, len(pods) - placed, 1 - free / total, lost / total)


def _choice(
    state: Remainders, pod: Pod, rule: Rule, classes: Classes
) -> tuple[float, Remainders] | None:
    """Return the cheapest way to place a pod on a node in this state; None if it does not fit."""
    usable = [index for index, rest in enumerate(state) if rest >= pod.share]
    if len(usable) < pod.gpus:
        return None
    if pod.gpus > 1:  # whole devices
        ways = [usable[-pod.gpus :]]
    else:
        ways = [[index] for index in {state[index]: index for index in usable}.values()]
    outcomes = []
    for way in ways:
        after = tuple(sorted(rest - pod.share * (i in way) for i, rest in enumerate(state)))
        outcomes.append((rule(state, after, classes), after))
    return min(outcomes)
