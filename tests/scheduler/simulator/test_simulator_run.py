"""The simulator's closed loop: no event is lost in it, and impossible input is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from jupyter_sing.scheduler.decisions import Decision, Evict, Grant, MigrateMemory, Pack, Preempt
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import (
    CellFinished,
    CellSubmitted,
    Event,
    Evicted,
    Moved,
    Released,
    SessionAdded,
    SessionRemoved,
    Started,
)
from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulationError
from jupyter_sing.simulator.run import TICKS_IN_VAIN_MAX, Scheduler, Simulation
from jupyter_sing.simulator.workload import GB, Workload, arranged
from tests.scheduler.simulated import Audit, cells_of, chance, ends, instant, run, session, waits

SCHEDULERS: dict[str, Callable[[Sequence[DeviceSpec]], Scheduler]] = {**BASELINES, "sing": Engine}
GPU = "node0/gpu0"
OTHER = "node0/gpu1"


class Script:
    """Returns decisions for each event by its type and session; none without an entry."""

    def __init__(self, answers: dict[tuple[type, str], Sequence[Decision]]) -> None:
        self._answers = answers
        self.events: list[Event] = []

    def next_tick(self) -> float | None:
        return None

    def handle(self, event: Event) -> Sequence[Decision]:
        self.events.append(event)
        return self._answers.pop((type(event), getattr(event, "session", "")), ())


def grant(name: str, token: int, *devices: str) -> Grant:
    return Grant(name, devices or (GPU,), token, 60.0, "a test")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gpus_max", [1, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_nothing_is_lost_whoever_schedules(name: str, gpus_max: int, seed: int) -> None:
    workload = chance(seed, gpus_max=gpus_max)
    cluster = SimulatedCluster(3, switch=0.5, bandwidth=4 * GB)
    audit = Audit(SCHEDULERS[name](cluster.devices()))
    outcome = run(workload, cluster, audit)
    assert len(outcome.cells) == workload.cells
    for each in workload.sessions:
        records = cells_of(outcome, each.name)
        assert records[0].submitted == pytest.approx(each.cells[0].think)
        for cell, record, before in zip(each.cells, records, [None, *records], strict=False):
            assert record.duration == cell.duration
            assert record.finished - record.started >= cell.duration - 1e-6
            assert record.started >= record.submitted
            if before is not None:  # think time is kept, however late the cell before ended
                assert record.submitted == pytest.approx(before.finished + cell.think)
        work = sum(cell.duration for cell in each.cells)
        assert audit.executed[each.name] == pytest.approx(work)
    assert outcome.executed == pytest.approx(workload.work)
    assert outcome.charged == pytest.approx(outcome.executed + outcome.switching)
    assert outcome.charged == pytest.approx(sum(end - begin for *_, begin, end in audit.held))
    held = sorted(audit.held, key=lambda hold: (hold[0], hold[2], hold[3]))
    for (device, _, _, end), (following, _, begin, _) in pairwise(held):
        assert device != following or end <= begin
    assert [event.at for event in audit.events] == sorted(event.at for event in audit.events)
    assert sum(isinstance(event, SessionRemoved) for event in audit.events) == 12


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_run_is_the_same_again(name: str) -> None:
    def once() -> list[tuple[float, Decision]]:
        cluster = SimulatedCluster(2)
        audit = Audit(SCHEDULERS[name](cluster.devices()))
        run(chance(5, gpus_max=2), cluster, audit)
        return audit.decisions

    assert once() == once()


def test_a_switch_takes_its_constant_and_its_bytes() -> None:
    # 16 GB at 4 GB/s: 4 s in, and 4 s out for the one that was there and has just stopped.
    workload = arranged(
        [
            session("a", (0, 10), (40, 10), memory=16 * GB),
            session("b", (0, 10), memory=16 * GB),
        ]
    )
    cluster = instant(1, switch=1.0, bandwidth=4 * GB)
    outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
    assert waits(outcome, "a")[0] == 5.0
    assert ends(outcome, "a")[0] == 15.0
    assert waits(outcome, "b") == [15.0 + 4 + 5]
    assert ends(outcome, "b") == [34.0]
    # A second time: b has ended and its memory is free, but a's state is in host memory.
    assert waits(outcome, "a")[1] == 5.0
    assert (outcome.swaps, outcome.moved) == (1, 4 * 16 * GB)
    assert outcome.switching == 15.0  # evicting is not charged to a lease: it had none yet


def test_memory_copied_in_the_background_is_not_written_again() -> None:
    workload = arranged(
        [
            session("a", (0, 10), (100, 1), memory=16 * GB),
            session("b", (17, 10), memory=16 * GB),
        ]
    )
    for behind, seconds in ((True, 1.0), (False, 4.0)):  # 3 of 4 s were copied
        cluster = SimulatedCluster(1, bandwidth=4 * GB, switch=0.0, suspend=0.0, copy_behind=behind)
        outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
        assert waits(outcome, "b") == [seconds + 4.0]


def test_co_residents_switch_for_nothing() -> None:
    workload = arranged([session(name, (0, 10), (5, 10), memory=8 * GB) for name in "ab"])
    cluster = instant(1, switch=1.0)
    outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
    assert waits(outcome, "a") == [1.0, 6.0]  # its second cell waits until b has ended
    assert waits(outcome, "b") == [12.0, 5.0]
    assert outcome.swaps == 0


def test_preempted_cells_continue_where_they_were() -> None:
    script = Script(
        {
            (CellSubmitted, "a"): [grant("a", 1)],
            (CellSubmitted, "b"): [Preempt("a", 1, "a test"), Preempt("a", 1, "said twice")],
            (Released, "a"): [grant("b", 2)],
            (CellFinished, "b"): [grant("a", 3)],
        }
    )
    workload = arranged([session("a", (0, 10)), session("b", (4, 3))])
    outcome = run(workload, instant(1, suspend=0.5), script)
    assert ends(outcome, "b") == [7.5]
    assert ends(outcome, "a") == [7.5 + 5.5]  # it executed until its gate was closed
    assert (outcome.preemptions, outcome.executed) == (1, 13.0)
    assert waits(outcome, "a") == [0.0]  # its first start counts


def test_a_cell_that_ends_before_its_gate_closes_is_finished() -> None:
    script = Script(
        {
            (CellSubmitted, "a"): [grant("a", 1)],
            (CellSubmitted, "b"): [Preempt("a", 1, "a test")],
            (CellFinished, "a"): [grant("b", 2)],
        }
    )
    workload = arranged([session("a", (0, 5)), session("b", (4, 1))])
    outcome = run(workload, instant(1, suspend=2.0), script)
    assert ends(outcome, "a") == [5.0]
    assert not any(isinstance(event, Released) for event in script.events)


def test_a_cell_stopped_while_it_loads_has_not_started() -> None:
    script = Script(
        {
            (CellSubmitted, "a"): [grant("a", 1)],
            (CellSubmitted, "b"): [Preempt("a", 1, "a test")],
            (Released, "a"): [grant("b", 2)],
            (CellFinished, "b"): [grant("a", 3)],
        }
    )
    workload = arranged([session("a", (0, 5)), session("b", (1, 1))])
    outcome = run(workload, instant(1, switch=3.0), script)
    # Two loads of 3 s, one after the other on the same link; a is resident when its turn comes.
    assert (waits(outcome, "b"), ends(outcome, "b"), waits(outcome, "a")) == ([5.0], [7.0], [7.0])
    assert outcome.charged == pytest.approx(outcome.executed + outcome.switching)


def test_idle_sessions_move_between_devices() -> None:
    script = Script(
        {
            (CellSubmitted, "a"): [grant("a", 1)],
            (CellFinished, "a"): [MigrateMemory("a", GPU, OTHER, "a test")],
            (Moved, "a"): [],
        }
    )
    workload = Workload((session("a", (0, 5), (20, 1), memory=8 * GB),))
    cluster = SimulatedCluster(2, switch=0.0, suspend=0.0, bandwidth=4 * GB, copy_behind=False)
    simulation = Simulation(workload, cluster, script)
    with pytest.raises(SimulationError, match="Nothing is decided any more: 1 sessions wait"):
        simulation.run()
    moved = next(event for event in script.events if isinstance(event, Moved))
    assert (moved.at, moved.device) == (2 + 5 + 2 + 2, OTHER)


def test_gangs_start_when_all_their_devices_are_loaded() -> None:
    workload = arranged([session("a", (0, 10), gpus=2, memory=8 * GB)])
    cluster = instant(2, bandwidth=4 * GB)
    outcome = run(workload, cluster, BASELINES["fcfs"](cluster.devices()))
    assert waits(outcome, "a") == [2.0]  # each over its own link
    assert (outcome.executed, outcome.switching) == (20.0, 4.0)


TWO = arranged([session("a", (0, 10)), session("b", (1, 10))])
BIG = arranged([session("a", (0, 10), memory=20 * GB), session("b", (11, 10), memory=20 * GB)])


@pytest.mark.parametrize(
    ("workload", "answers", "says"),
    [
        (
            TWO,
            {(CellSubmitted, "a"): [grant("a", 1)], (CellSubmitted, "b"): [grant("b", 2)]},
            "node0/gpu0 was granted to b while a has it",
        ),
        (
            arranged([session("a", (0, 1), (90, 1), memory=20 * GB), BIG.sessions[1]]),
            {(CellSubmitted, "a"): [grant("a", 1)], (CellSubmitted, "b"): [grant("b", 2)]},
            "b does not fit on node0/gpu0 beside a",
        ),
        (
            TWO,
            {(CellSubmitted, "a"): [grant("a", 2)], (CellFinished, "a"): [grant("b", 2)]},
            "Token 2 of b is not new",
        ),
        (TWO, {(SessionAdded, "a"): [grant("a", 1)]}, "devices that it cannot use now"),
        (TWO, {(CellSubmitted, "a"): [grant("a", 1, GPU, OTHER)]}, "a was granted 2 devices"),
        (TWO, {(CellSubmitted, "a"): [grant("a", 1, "node9/gpu0")]}, "no device node9/gpu0"),
        (TWO, {(CellSubmitted, "a"): [grant("c", 1)]}, "There is no session c"),
        (
            TWO,
            {
                (CellSubmitted, "a"): [grant("a", 1)],
                (Started, "a"): [Evict("a", GPU, "host", "a test")],
            },
            "a cannot be evicted from node0/gpu0 now",
        ),
        (
            TWO,
            {(CellSubmitted, "a"): [MigrateMemory("a", GPU, OTHER, "a test")]},
            "a cannot be moved from node0/gpu0 now",
        ),
        (TWO, {(CellSubmitted, "a"): [Pack(("a", "b"), GPU, "a test")]}, "may be packed"),
        (TWO, {}, "Nothing is decided any more: 2 sessions wait"),
    ],
)
def test_impossible_workloads_are_refused(
    workload: Workload, answers: dict[tuple[type, str], Sequence[Decision]], says: str
) -> None:
    with pytest.raises(SimulationError, match=says):
        run(workload, instant(2), Script(answers))


def test_memory_goes_with_its_session() -> None:
    script: dict[tuple[type, str], Sequence[Decision]] = {
        (CellSubmitted, "a"): [grant("a", 1)],
        (CellSubmitted, "b"): [grant("b", 2)],
    }
    assert len(run(BIG, instant(1), Script(script)).cells) == 2


def test_ticks_without_end_are_noticed() -> None:
    class Restless(Script):
        def next_tick(self) -> float | None:
            return 0.0

    with pytest.raises(SimulationError, match="Ticks without end"):
        run(TWO, instant(1), Restless({}))


def test_sessions_that_never_fit_are_refused_at_once() -> None:
    with pytest.raises(SimulationError, match="needs 2 devices of 1"):
        run(arranged([session("a", (0, 1), gpus=2)]), instant(1), Script({}))
    wide = arranged([session("a", (0, 1), gpus=2)])
    with pytest.raises(SimulationError, match="needs 2 devices at once, and a host has 1 at most"):
        run(wide, instant(2, gpus_per_node=1), Script({}))
    with pytest.raises(SimulationError, match=r"needs 25\.0 GB of a device, which has 24\.0"):
        run(arranged([session("a", (0, 1), memory=25 * GB)]), instant(1), Script({}))


def test_a_session_whose_memory_is_on_its_way_closes_when_it_is_there() -> None:
    script = Script(
        {
            (CellSubmitted, "a"): [grant("a", 1)],
            (CellFinished, "a"): [Evict("a", GPU, "host", "a test")],
        }
    )
    run(
        arranged([session("a", (0, 1), memory=8 * GB)]),
        SimulatedCluster(1, switch=0.0, bandwidth=4 * GB),
        script,
    )
    assert [type(event) for event in script.events[-2:]] == [Evicted, SessionRemoved]
    assert script.events[-1].at == 2 + 1 + 2


def test_many_rounds_within_a_long_cell_are_no_fault() -> None:
    class Rounds(Script):
        def next_tick(self) -> float | None:
            return self.events[-1].at + 1.0 if self.events else None

    long = TICKS_IN_VAIN_MAX + 10.0
    script = Rounds({(CellSubmitted, "a"): [grant("a", 1)]})
    assert run(arranged([session("a", (0, long))]), instant(1), script).finished == long
