"""Each baseline behaves on a few cells as described, computed by hand."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler.decisions import Grant, Preempt
from jupyter_sing.scheduler.events import BandwidthMeasured
from jupyter_sing.simulator import report
from jupyter_sing.simulator.baselines import BASELINES
from jupyter_sing.simulator.baselines.las import Las
from jupyter_sing.simulator.baselines.nvshare import Nvshare
from jupyter_sing.simulator.cluster import SimulatedCluster
from jupyter_sing.simulator.generator import Parameters, generate
from jupyter_sing.simulator.outcome import SimulationOutcome
from jupyter_sing.simulator.workload import GB, Workload, arranged
from tests.scheduler.simulated import Audit, ends, instant, run, session, waits


def simulate(name: str, workload: Workload, cluster: SimulatedCluster) -> SimulationOutcome:
    return run(workload, cluster, BASELINES[name](cluster.devices()))


def test_a_reservation_ends_with_its_session() -> None:
    workload = arranged(
        [
            session("a", (0, 10), (5000, 10)),
            session("b", (5, 10), (5, 10)),
            session("c", (6, 10)),
        ]
    )
    outcome = simulate("reserve", workload, instant(1))
    assert waits(outcome, "a") == [0.0, 0.0]
    assert waits(outcome, "b") == [5020.0 - 5.0, 0.0]
    assert waits(outcome, "c") == [5045.0 - 6.0]  # 5,020 and 10 + 5 + 10 of b


def test_a_culled_session_queues_again() -> None:
    workload = arranged(
        [session("a", (0, 10), (1900, 10)), session("b", (5, 200), (1799, 1)), session("c", (9, 1))]
    )
    outcome = simulate("cull30", workload, instant(1))
    assert waits(outcome, "a")[0] == 0.0
    assert waits(outcome, "b") == [1810.0 - 5.0, 0.0]  # b is idle for a second less than it may be
    # a asks again at 1,910, behind c: b closes at 2,010 + 1,799 + 1.
    assert waits(outcome, "c") == [3810.0 - 9.0]
    assert waits(outcome, "a")[1] == 3811.0 - 1910.0


def test_first_come_first_served_overtakes_no_session() -> None:
    workload = arranged(
        [
            session("a", (0, 10)),
            session("wide", (1, 10), gpus=2),
            session("c", (2, 1)),
        ]
    )
    outcome = simulate("fcfs", workload, instant(2))
    assert waits(outcome, "wide") == [9.0]
    assert waits(outcome, "c") == [18.0]  # a device was free all the time until 10


def test_a_cell_runs_where_it_is_resident() -> None:
    workload = arranged(
        [
            session("a", (0, 10), (10, 10), memory=9 * GB),
            session("b", (1, 10), (9, 10), memory=9 * GB),
            session("c", (12, 1), memory=9 * GB),
        ]
    )
    cluster = instant(2)
    audit = Audit(BASELINES["fcfs"](cluster.devices()))
    outcome = run(workload, cluster, audit)
    places = {(name, begin): device for device, name, begin, _ in audit.held}
    assert places["a", 0.0] == places["a", 20.0] != places["b", 1.0] == places["b", 20.0]
    assert outcome.swaps == 0


def test_the_least_recently_used_session_makes_room() -> None:
    workload = arranged(
        [
            session("a", (0, 1), (30, 1), memory=10 * GB),
            session("b", (5, 1), (30, 1), memory=10 * GB),
            session("c", (10, 1), memory=10 * GB),
        ]
    )
    cluster = instant(1, bandwidth=10 * GB)
    outcome = simulate("fcfs", workload, cluster)
    assert waits(outcome, "c") == [1.0]  # a's state was copied long before
    assert waits(outcome, "a") == [1.0, 1.0]  # it comes back, and c has closed
    assert waits(outcome, "b") == [1.0, 0.0]
    assert outcome.swaps == 1


def test_locks_are_passed_around_in_turns() -> None:
    workload = arranged([session("a", (0, 50)), session("b", (10, 45)), session("c", (20, 5))])
    outcome = simulate("nvshare", workload, instant(1))
    # a 0-30, b 30-60, c 60-65 and closes, a 65-85, b 85-100
    assert [waits(outcome, name) for name in "abc"] == [[0.0], [20.0], [40.0]]
    assert [ends(outcome, name) for name in "abc"] == [[85.0], [100.0], [65.0]]


def test_a_holder_that_comes_back_in_time_keeps_the_lock() -> None:
    workload = arranged([session("a", (0, 10), (4, 10), (6, 10)), session("b", (5, 5))])
    outcome = simulate("nvshare", workload, instant(1))
    # The second ends at 24 s; at 29 s the holder is found idle. b runs until 34 s.
    assert waits(outcome, "a") == [0.0, 0.0, 4.0]
    assert waits(outcome, "b") == [24.0]


def test_quanta_without_waiters_cut_nothing() -> None:
    workload = arranged([session("a", (0, 100)), session("b", (70, 5))])
    cluster = instant(1)
    audit = Audit(Nvshare(cluster.devices()))
    outcome = run(workload, cluster, audit)
    stopped = [at for at, decision in audit.decisions if isinstance(decision, Preempt)]
    assert stopped == [90.0]
    assert waits(outcome, "b") == [20.0]


def test_homes_are_chosen_by_the_number_of_sessions_alone() -> None:
    workload = arranged(
        [session("a", (0, 100)), session("b", (1, 1)), session("c", (3, 10)), session("d", (4, 1))]
    )
    outcome = simulate("nvshare", workload, instant(2))
    # b has closed when c comes: the second device has no session, then as many as the first.
    assert waits(outcome, "c") == [0.0]
    assert waits(outcome, "d") == [26.0]  # with a, although the other is idle from 13 s


def test_least_attained_service_stops_whoever_had_more() -> None:
    workload = arranged([session("a", (0, 200)), session("b", (130, 30))])
    cluster = instant(1)
    audit = Audit(Las(cluster.devices(), threshold=100.0))
    outcome = run(workload, cluster, audit)
    assert [at for at, decision in audit.decisions if isinstance(decision, Preempt)] == [180.0]
    assert waits(outcome, "b") == [50.0]  # at the boundary of a round
    assert ends(outcome, "a") == [230.0]


def test_below_the_threshold_las_is_first_come_first_served() -> None:
    workload = arranged([session("a", (0, 90)), session("b", (10, 90)), session("c", (20, 90))])
    cluster = instant(1)
    audit = Audit(Las(cluster.devices(), threshold=100.0))
    outcome = run(workload, cluster, audit)
    assert not any(isinstance(decision, Preempt) for _, decision in audit.decisions)
    assert [ends(outcome, name) for name in "abc"] == [[90.0], [180.0], [270.0]]


def test_a_gang_is_chosen_when_its_devices_can_be_stopped() -> None:
    workload = arranged(
        [session("a", (0, 500)), session("b", (0, 500)), session("wide", (110, 20), gpus=2)]
    )
    cluster = instant(2)
    audit = Audit(Las(cluster.devices(), threshold=100.0))
    outcome = run(workload, cluster, audit)
    assert waits(outcome, "wide") == [10.0]
    grants = [d.devices for _, d in audit.decisions if isinstance(d, Grant) and len(d.devices) > 1]
    assert grants == [("node0/gpu0", "node0/gpu1")]


def test_a_baseline_lists_what_it_does_not_model() -> None:
    with pytest.raises(NotImplementedError, match="BandwidthMeasured"):
        BASELINES["fcfs"]([]).handle(BandwidthMeasured(0.0, "node0/gpu0", 1e9, 0.1))


def test_the_pilots_order_of_the_baselines() -> None:
    """A small version of the pilot's week: only the order counts, not the figures."""
    workload = generate(Parameters(sessions=24, training=1500, days=3, load=2.4), seed=2)
    cluster = SimulatedCluster(3)
    found = {name: report.measure(name, simulate(name, workload, cluster)) for name in BASELINES}
    # Reservations keep idle devices: the last ones are admitted days late.
    assert found["reserve"].finished_days > 1.5 * found["fcfs"].finished_days
    assert found["reserve"].ttg_max > found["cull30"].ttg_max > 5 * found["fcfs"].ttg_max
    # First come, first served: long cells are hardly slower, short ones wait for minutes.
    assert found["fcfs"].long_cell_slowdown < 1.2
    assert found["fcfs"].ttg_p99 > 60
    # Turns lengthen long cells.
    assert found["nvshare"].long_cell_slowdown > found["fcfs"].long_cell_slowdown
    # Rounds of least attained service: shorter waits than FCFS, for slower long cells.
    assert found["las"].ttg_p99 < found["fcfs"].ttg_p99
    assert found["las"].long_cell_slowdown > found["fcfs"].long_cell_slowdown
