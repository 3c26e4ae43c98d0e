"""Runs of ``jupyter sing simulate``. Only that command loads the simulator."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from jupyter_sing.cli.policy import read_policy
from jupyter_sing.cli.progress import ProgressLine
from jupyter_sing.notebook.status_text import Table
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.policy import Policy
from jupyter_sing.scheduler.policy.numbers import numbers
from jupyter_sing.scheduler.settings import TARGETS, EngineSettings
from jupyter_sing.simulator import openb, plot, report, workload
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulationError
from jupyter_sing.simulator.generator import Parameters, generate
from jupyter_sing.simulator.run import Scheduler, Simulation, equals
from jupyter_sing.simulator.users import NOT_SIMULATED, described, simulated_policy
from jupyter_sing.simulator.workload import GB, Workload, WorkloadError
from kernelproxy.common.errors import ControlError

GENERATOR = "generator"
LINE_CHARACTERS_MAX = 10_000


def run(options: argparse.Namespace) -> int:
    """Simulate as the arguments say; the same ones give the same figures."""
    policy = read_policy(options.policy) if options.policy else None
    names = described(policy) if policy is not None else ()
    if names and len(names) != options.gpus:
        raise ControlError(
            f"{options.policy}: it describes {len(names)} devices, not {options.gpus}.",
            "cannot-simulate",
        )
    cluster = SimulatedCluster(
        gpus=options.gpus,
        names=names,
        memory=int(options.memory * GB),
        bandwidth=options.bandwidth * GB,
        switch=options.switch,
    )
    found = _workload(options, cluster)
    targets = TARGETS if policy is None else numbers(policy, (), EngineSettings()).targets
    results, curves = [], []
    for name in ("sing", *(BASELINES if options.baselines else ())):
        try:
            with ProgressLine(f"Simulating {name}") as line:
                outcome = _simulation(name, found, cluster, policy, _steps(line)).run()
        except SimulationError as error:
            raise ControlError(f"{name}: {error}", "cannot-simulate") from None
        results.append(report.measure(name, outcome, targets))
        curves.append((name, [cell.time_to_gpu for cell in outcome.cells]))
    if options.plot:
        with open(options.plot, "w", encoding="utf-8") as file:
            file.write(plot.plot(curves))
    if options.json:
        shown: dict[str, Any] = report.as_json(
            len(found.sessions), found.cells, cluster.gpus, results
        )
        if policy is not None:
            shown["note"] = NOT_SIMULATED
        print(json.dumps(shown, indent=1))
        return 0
    work = found.work / (cluster.gpus * found.span) if found.span else 0.0
    print(
        f"{len(found.sessions)} sessions, {found.cells:,} cells, {cluster.gpus} devices, "
        f"offered load {100 * work:.0f} %\n"
    )
    print(Table(report.HEADER, report.rows(results)))
    if policy is not None:
        print(f"\nOf the policy, {NOT_SIMULATED}.")
    return 0


def _simulation(
    name: str,
    found: Workload,
    cluster: SimulatedCluster,
    policy: Policy | None,
    show: Callable[[int, int], None],
) -> Simulation:
    """Prepare a run; tiers are counted for all schedulers, but known only to ours."""
    devices, terms = cluster.devices(), equals
    settings, guarantees = None, None
    if policy is not None:
        simulated = simulated_policy(policy, found, devices)
        settings, guarantees = simulated.settings, simulated.leases
        terms = simulated.of
    scheduler: Scheduler = (
        Engine(devices, settings, guarantees) if name == "sing" else BASELINES[name](devices)
    )
    return Simulation(found, cluster, scheduler, terms, show)


def _workload(options: argparse.Namespace, cluster: SimulatedCluster) -> Workload:
    """Read or generate the workload."""
    try:
        if options.workload == GENERATOR:
            parameters = Parameters(quick=options.bursts, memory_max=0.9 * cluster.memory)
            return generate(parameters, options.seed)
        with open(options.workload, encoding="utf-8", newline="") as file:
            lines = _lines(file)
            header = next(lines, "")
            if openb.is_pods(header):
                pods = openb.read_pods(chain([header], lines))
                return openb.workload(pods, cluster.memory)
            return workload.read(chain([header], lines))
    except UnicodeDecodeError:
        raise ControlError(f"{options.workload}: it is not UTF-8 text.", "bad-workload") from None
    except WorkloadError as error:
        raise ControlError(f"{options.workload}: {error}", "bad-workload") from None
    except ValueError as error:  # the generator's
        raise ControlError(str(error), "bad-workload") from None


def _lines(file: Any) -> Iterator[str]:
    """Yield the lines of a file; raise if one is longer than a row can be."""
    number = 0
    while line := file.readline(LINE_CHARACTERS_MAX):
        number += 1
        if len(line) == LINE_CHARACTERS_MAX:
            raise WorkloadError(
                f"line {number}: it is longer than {LINE_CHARACTERS_MAX} characters"
            )
        yield line


def _steps(line: ProgressLine) -> Callable[[int, int], None]:
    """Return a callback that shows progress at each percent."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // total
        if percent != shown:
            shown = percent
            line.show_share(done, total)

    return show
