"""Elastic sessions in the simulator: what elasticity is worth, and that the books balance."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulationError
from jupyter_sing.simulator.outcome import SimulationOutcome
from jupyter_sing.simulator.workload import (
    GB,
    SimulatedSession,
    Workload,
    WorkloadError,
    arranged,
    read,
    write,
)
from tests.scheduler.simulated import Audit, ends, instant, run, session

HEADER = "session,num_gpu,start_min,dur_min,memory_gb,min_gpu"


def elastic(each: SimulatedSession) -> SimulatedSession:
    return replace(each, gpus_min=1) if each.gpus > 1 else each


def engine(cluster: SimulatedCluster, grow_after: float = 30.0) -> Engine:
    return Engine(cluster.devices(), EngineSettings(grow_after=grow_after))


def mixed(seed: int) -> Workload:
    """Trainings on two or four devices, among notebooks that need one now and then."""
    random = Random(seed)
    sessions = []
    for index in range(4):
        cells = [(random.uniform(0, 1800), random.uniform(600, 3600)) for _ in range(3)]
        gpus = random.choice([2, 4])
        sessions.append(session(f"training{index}", *cells, gpus=gpus, memory=4 * GB))
    for index in range(4):
        cells = [(random.expovariate(1 / 300), random.expovariate(1 / 120)) for _ in range(40)]
        sessions.append(session(f"notebook{index}", *cells, memory=2 * GB))
    return arranged(sessions)


def slowdown(outcome: SimulationOutcome, name: str) -> float:
    """Return how many times as long as alone the cells of some sessions took, on average."""
    took = [
        (c.finished - c.submitted) / c.duration for c in outcome.cells if c.session.startswith(name)
    ]
    return sum(took) / len(took)


@pytest.mark.parametrize("seed", range(4))
def test_elasticity_ends_trainings_sooner_and_uses_idle_devices(seed: int) -> None:
    cluster = SimulatedCluster(4)
    rigid = mixed(seed)
    loose = Workload(tuple(map(elastic, rigid.sessions)))
    before = run(rigid, cluster, engine(cluster))
    after = run(loose, cluster, engine(cluster))
    used = [outcome.executed / (4 * outcome.finished) for outcome in (before, after)]
    assert used[1] > used[0]
    assert slowdown(after, "training") < slowdown(before, "training")
    assert after.finished <= before.finished * 1.01


def test_work_of_an_elastic_session_is_the_same_on_any_number_of_devices() -> None:
    cluster = instant(2)
    busy = session("busy", (0.0, 100.0))
    job = session("job", (1.0, 50.0), gpus=4)
    audit = Audit(engine(cluster, grow_after=10.0))
    outcome = run(arranged([busy, elastic(job)]), cluster, audit)
    # Four ranks take turns on one device, until the other one has been free for 10 s.
    seconds = sum(end - begin for _, name, begin, end in audit.held if name == "job")
    assert seconds == pytest.approx(4 * 50.0, rel=1e-3)
    assert ends(outcome, "job")[0] < 1.0 + 200.0


def test_an_elastic_session_may_have_more_ranks_than_a_host_has_devices() -> None:
    cluster = instant(2)
    job = session("job", (0.0, 10.0), gpus=4)
    with pytest.raises(SimulationError, match="needs 4 devices of 2"):
        run(arranged([job]), cluster, engine(cluster))
    outcome = run(arranged([elastic(job)]), cluster, engine(cluster))
    assert ends(outcome, "job") == [20.0]


@pytest.mark.parametrize("seed", range(8))
def test_random_elastic_workloads_end_and_balance(seed: int) -> None:
    """The simulation refuses all impossible decisions: two holders, more bytes than fit, …"""
    random = Random(seed)
    sessions = []
    for index in range(10):
        cells = [
            (60 * random.random(), 0.5 + 100 * random.random() ** 3)
            for _ in range(random.randint(1, 8))
        ]
        gpus = random.choice([1, 1, 2, 3, 4])
        memory = int(random.uniform(0.5, 20.0 / gpus) * GB)
        each = session(f"s{index}", *cells, gpus=gpus, memory=memory)
        sessions.append(elastic(each) if random.random() < 0.8 else each)
    cluster = SimulatedCluster(4)
    scheduler = Engine(cluster.devices(), EngineSettings(grow_after=random.choice([0.0, 5.0])))
    workload = arranged(sessions)
    outcome = run(workload, cluster, scheduler)
    assert len(outcome.cells) == workload.cells
    assert sum(scheduler.statistics().served.values()) >= workload.work * 0.999


def test_workloads_name_the_least_number_of_devices() -> None:
    rows = [HEADER, "a,4,0,10,8,1", "a,4,20,10,8,", "b,2,0,10,8,2", "c,2,0,10,8,"]
    found = {each.name: each.gpus_min for each in read(rows).sessions}
    assert found == {"a": 1, "b": 2, "c": None}
    assert read(write(read(rows))) == read(rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,2,0,1,8,0", "min_gpu must be a whole number from 1, not 0"),
        ("a,2,0,1,8,1.5", "min_gpu must be a whole number from 1, not 1.5"),
        ("a,2,0,1,8,3", "min_gpu must not be more than num_gpu"),
    ],
)
def test_least_numbers_that_cannot_be_are_refused(row: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=f"line 2: {message}"):
        read([HEADER, row])
