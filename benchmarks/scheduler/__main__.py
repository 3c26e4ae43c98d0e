"""The scheduler beside what else is done today: the pilot's week of notebooks, in virtual time.

    python -m benchmarks.scheduler [--first SEED] [--seeds N] [--no-baselines] [--write FILE]

71 notebooks of one GPU each, 7 days, 6 devices, offered load 5.25; the same with switching at 1 s
and 4 GB/s; and the same load with 63,500 cells of seconds among the training ones. All is drawn by
seed: the figures are the same on every machine. The engine's numbers were chosen by weeks of other
seeds (`TUNED`) than those that are reported. What must hold is said, met or not, for every seed;
the exit status is 1 if anything is not. At the end, fractions of devices: the requests of openb.
"""

from __future__ import annotations

import argparse
import operator
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scheduler.sharing import RULES, pack
from jupyter_sing.cli.progress import ProgressLine
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.simulator import openb, plot, report
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.generator import PILOT, PILOT_WITH_BURSTS, Parameters, generate
from jupyter_sing.simulator.outcome import SimulationOutcome
from jupyter_sing.simulator.report import Result
from jupyter_sing.simulator.run import Simulation
from jupyter_sing.simulator.workload import GB, Workload

OPENB = Path(__file__).resolve().parents[2] / "tests" / "scheduler" / "openb"
GPUS = 6
TUNED = range(10)
"""Seeds of the weeks by which the engine's numbers were chosen."""
FIRST = 100
"""The first seed that is reported."""
FAST = SimulatedCluster(GPUS)
SLOW = SimulatedCluster(GPUS, switch=1.0, bandwidth=4.0 * GB)


@dataclass(frozen=True)
class Requirement:
    """A requirement on one of our figures: `holds(figure, bound)`."""

    figure: str
    holds: Callable[[float, float], bool]
    bound: float


INTERACTIVE = (
    Requirement("ttg_p99", operator.le, 2.0),
    Requirement("short_cells_within_1s", operator.ge, 0.95),
    Requirement("long_cell_slowdown", operator.le, 1.2),
    Requirement("jain", operator.ge, 0.98),
)


@dataclass(frozen=True)
class Setting:
    """One week, one cluster, and the claims."""

    title: str
    parameters: Parameters
    cluster: SimulatedCluster
    claims: tuple[Requirement, ...] = ()


SETTINGS = (
    Setting("The pilot's week, 0.1 s + 20 GB/s", PILOT, FAST, INTERACTIVE),
    Setting(
        "Slow switching, 1 s + 4 GB/s", PILOT, SLOW, (Requirement("ttg_p99", operator.le, 8.0),)
    ),
    Setting("With bursts of cells of seconds", PILOT_WITH_BURSTS, FAST),
)


@dataclass(frozen=True)
class SimulatedRun:
    """One scheduler's figures for one seed, and the seconds of the simulation."""

    seed: int
    result: Result
    outcome: SimulationOutcome
    seconds: float


def simulate(name: str, workload: Workload, cluster: SimulatedCluster, seed: int) -> SimulatedRun:
    """Run one scheduler; ``sing`` is ours."""
    devices = cluster.devices()
    scheduler = Engine(devices) if name == "sing" else BASELINES[name](devices)
    begin = time.perf_counter()
    outcome = Simulation(workload, cluster, scheduler).run()
    seconds = time.perf_counter() - begin
    return SimulatedRun(seed, report.measure(name, outcome), outcome, seconds)


def measure(setting: Setting, seeds: Sequence[int], baselines: bool) -> list[SimulatedRun]:
    """Run our scheduler with every seed, and the baselines with the first."""
    runs = []
    for seed in seeds:
        workload = generate(setting.parameters, seed)
        names = ["sing", *(BASELINES if baselines and seed == seeds[0] else ())]
        with ProgressLine(setting.title) as line:
            for index, name in enumerate(names):
                line.show_share(index, len(names))
                runs.append(simulate(name, workload, setting.cluster, seed))
    return runs


def verdicts(setting: Setting, runs: Sequence[SimulatedRun]) -> list[tuple[bool, str]]:
    """Return for each claim and each seed whether it holds, with a text."""
    found = []
    for run in (run for run in runs if run.result.scheduler == "sing"):
        for claim in setting.claims:
            figure = float(getattr(run.result, claim.figure))
            met = claim.holds(figure, claim.bound)
            sign = "at most" if claim.holds is operator.le else "at least"
            text = f"{claim.figure} {figure:.3f}, {sign} {claim.bound:g} (seed {run.seed})"
            found.append((met, f"{'met' if met else 'NOT MET'}: {text}"))
    return found


def page(setting: Setting, runs: Sequence[SimulatedRun]) -> str:
    """Write a setting's table and verdicts as Markdown."""
    seconds = max(run.seconds for run in runs)
    named = [f"{run.result.scheduler} (seed {run.seed})" for run in runs]
    rows = [
        (name, *row[1:])
        for name, row in zip(named, report.rows([run.result for run in runs]), strict=True)
    ]
    lines = [
        f"## {setting.title}",
        "",
        report.markdown_table(rows),
        "",
        *(f"- {text}" for _, text in verdicts(setting, runs)),
        f"- simulated in at most {seconds:.1f} s each",
        "",
    ]
    return "\n".join(lines)


def packing_page(every: int = 1) -> str:
    """Write the results of placement rules for openb's requests and nodes, or a sample of both."""
    files = [OPENB / f"openb_gpu_{name}.csv" for name in ("pods", "nodes")]
    pods, nodes = (file.read_text("utf-8").splitlines() for file in files)
    requests = openb.read_pods(pods)[::every]
    sizes = list(openb.read_nodes(nodes).values())[::every]
    lines = [
        "## Fractions of devices, openb",
        "",
        "| rule | placed | refused | allocated | fragmented |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, rule in RULES.items():
        found = pack(requests, sizes, rule)
        lines.append(
            f"| {name} | {found.placed:,} | {found.refused:,} | "
            f"{100 * found.allocated:.1f} % | {100 * found.fragmented:.1f} % |"
        )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables; exit status 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    first = f"seed of the first week (default: {FIRST}; the engine was tuned on "
    first += f"{TUNED.start} to {TUNED.stop - 1})"
    parser.add_argument("--first", type=int, default=FIRST, metavar="SEED", help=first)
    parser.add_argument("--seeds", type=int, default=3, help="weeks to draw (default: 3)")
    parser.add_argument("--no-baselines", action="store_true", help="only ours")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the first setting as SVG")
    thinned = "take every Nth of openb's requests and nodes (default: all)"
    parser.add_argument("--openb-every", type=int, default=1, metavar="N", help=thinned)
    options = parser.parse_args(arguments)
    if min(options.seeds, options.openb_every) < 1:
        parser.error("there is nothing to run")
    seeds = range(options.first, options.first + options.seeds)
    pages, met = [], True
    for setting in SETTINGS:
        runs = measure(setting, seeds, not options.no_baselines)
        pages.append(page(setting, runs))
        print(pages[-1], flush=True)
        met = met and all(holds for holds, _ in verdicts(setting, runs))
        if options.plot and setting is SETTINGS[0]:
            curves = [
                (run.result.scheduler, [cell.time_to_gpu for cell in run.outcome.cells])
                for run in runs
                if run.seed == seeds[0]
            ]
            options.plot.write_text(plot.plot(curves), "utf-8")
    pages.append(packing_page(options.openb_every))
    print(pages[-1], flush=True)
    if options.write:
        options.write.write_text("\n".join(pages), "utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
