"""``jupyter sing simulate``: our scheduler, and today's alternatives, on a workload."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

GPUS_MAX = 100_000


def add_verb(verbs: Any, common: argparse.ArgumentParser) -> None:
    """Add ``simulate``; called once, for the parser of the CLI."""
    text = "simulate the scheduler on a workload, in virtual time"
    verb = verbs.add_parser("simulate", parents=[common], help=text, description=text)
    verb.set_defaults(function=simulate)
    add = verb.add_argument
    add(
        "--workload",
        required=True,
        metavar="FILE|generator",
        help="CSV file with the columns session,num_gpu,start_min,dur_min[,memory_gb], CSV file of "
        "OpenB pods, or generator: a random week of 71 notebooks, fitted to published figures",
    )
    policy = "policy file; sessions named USER/NAME belong to USER, others to its users in turn"
    add("--policy", metavar="FILE", help=policy)
    add("--gpus", required=True, type=_whole(1, GPUS_MAX), metavar="N", help="number of GPUs")
    add(
        "--memory",
        type=_number(0, False),
        default=24.0,
        metavar="GB",
        help="memory of a GPU (default: 24)",
    )
    bandwidth = "bandwidth between a GPU and its host (default: 20)"
    add("--bandwidth", type=_number(0, False), default=20.0, metavar="GB/s", help=bandwidth)
    switch = "time that a switch takes in addition to the transfer of its bytes (default: 0.1)"
    add("--switch", type=_number(0, True), default=0.1, metavar="SECONDS", help=switch)
    baselines = "also simulate reservations, culling, first come first served, nvshare and LAS"
    add("--baselines", action="store_true", help=baselines)
    seed = "seed of the generator (default: 0)"
    add("--seed", type=_whole(0, 2**63), default=0, metavar="N", help=seed)
    bursts = "generator: number of cells of a few seconds among the training cells (default: 0)"
    add("--bursts", type=_whole(0, 10**7), default=0, metavar="N", help=bursts)
    add("--plot", metavar="FILE", help="also write a plot of the times to GPU, as SVG")


def simulate(options: argparse.Namespace) -> int:
    """``simulate``: the same arguments give the same figures."""
    from jupyter_sing.cli.simulation import run

    return run(options)


def _number(least: float, inclusive: bool) -> Callable[[str], float]:
    """Return a parser of finite numbers at least, or above, the bound."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least or (value == least and not inclusive):
            raise argparse.ArgumentTypeError(f"{text} is not {'from' if inclusive else 'above'} 0")
        return value

    return number


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range."""

    def whole(text: str) -> int:
        value = int(text) if len(text) < 30 else most + 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:30]} is not from {least} to {most}")
        return value

    return whole
