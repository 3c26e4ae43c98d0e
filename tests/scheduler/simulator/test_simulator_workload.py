"""Generated workloads have the published quantiles, and files say what is wrong with them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from random import Random

import pytest

from benchmarks.scheduler.sharing import RULES, pack
from jupyter_sing.simulator import openb, week, workload
from jupyter_sing.simulator.generator import (
    DAY,
    PILOT,
    PILOT_WITH_BURSTS,
    QUICK,
    QUICK_THINK,
    TRAINING,
    Parameters,
    generate,
)
from jupyter_sing.simulator.quantiles import Quantiles, quantile, sample
from jupyter_sing.simulator.workload import GB, Cell, Workload, WorkloadError
from tests.scheduler.simulated import session

OPENB = Path(__file__).parents[1] / "openb"
PUBLISHED_BURSTS = {0.5: 2, 0.75: 6, 0.9: 20, 0.95: 40, 0.99: 220}  # minutes
PUBLISHED_GAPS = {0.5: 1, 0.75: 3, 0.9: 7, 0.95: 15, 0.99: 563}


def durations(found: Workload) -> list[float]:
    return sorted(cell.duration for each in found.sessions for cell in each.cells)


def thinks(found: Workload) -> list[float]:
    return sorted(cell.think for each in found.sessions for cell in each.cells[1:])


@pytest.mark.parametrize("seed", range(3))
def test_training_cells_have_the_published_quantiles(seed: int) -> None:
    found = generate(Parameters(sessions=240, training=12_000, days=30, load=None), seed)
    cells = durations(found)
    assert len(cells) == 12_000
    for probability, minutes in PUBLISHED_BURSTS.items():
        assert quantile(cells, probability) / 60 == pytest.approx(minutes, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_gaps_have_the_published_quantiles(seed: int) -> None:
    gaps = thinks(generate(PILOT, seed))
    for probability, minutes in PUBLISHED_GAPS.items():
        # The longest gaps are between sessions, and users of the longest sessions shorten theirs.
        allowed = 0.15 if probability < 0.99 else 0.3
        assert quantile(gaps, probability) / 60 == pytest.approx(minutes, rel=allowed)


def test_cells_of_bursts_are_those_of_june() -> None:
    cells = sample(QUICK, 50_000, Random(1))
    gaps = sample(QUICK_THINK, 50_000, Random(2))
    assert quantile(sorted(cells), 0.5) == pytest.approx(0.8, rel=0.01)
    assert math.fsum(cells) / 50_000 == pytest.approx(6.3, rel=0.1)
    assert math.fsum(gaps) / 50_000 == pytest.approx(12, rel=0.02)
    spread = math.sqrt(math.fsum((gap - 12) ** 2 for gap in gaps) / 50_000)
    assert spread == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("parameters", "cells"), [(PILOT, 7581), (PILOT_WITH_BURSTS, 71_081)])
def test_the_pilots_setting(parameters: Parameters, cells: int, seed: int) -> None:
    found = generate(parameters, seed)
    assert (len(found.sessions), found.cells) == (71, cells)
    assert found.work / (7 * DAY) == pytest.approx(5.25)
    assert 6.5 * DAY < found.span <= 7.01 * DAY
    assert {each.gpus for each in found.sessions} == {1}
    memories = sorted(each.memory for each in found.sessions)
    assert quantile(memories, 0.5) == pytest.approx(8 * GB, rel=0.05)
    assert memories[-1] <= 22 * GB
    starts = [each.cells[0].think for each in found.sessions]
    assert starts == sorted(starts)


def test_scaled_cells_keep_their_shape() -> None:
    cells = durations(generate(PILOT, 3))
    median = quantile(cells, 0.5)
    for probability, minutes in PUBLISHED_BURSTS.items():
        assert quantile(cells, probability) / median == pytest.approx(minutes / 2, rel=0.03)


def test_the_same_seed_gives_the_same_workload() -> None:
    small = Parameters(sessions=5, training=60, quick=200, load=0.5)
    assert generate(small, 1) == generate(small, 1)
    assert generate(small, 1) != generate(small, 2)
    text = "\n".join(workload.write(generate(small, 1)))
    assert text == "\n".join(workload.write(generate(small, 1)))


def test_likeness_makes_sessions_differ() -> None:
    def spread(likeness: float) -> float:
        found = generate(dataclasses.replace(PILOT, likeness=likeness), 1)
        works = [math.fsum(c.duration for c in s.cells) / len(s.cells) for s in found.sessions]
        return max(works) / quantile(sorted(works), 0.5)

    assert spread(0.7) > 1.5 * spread(0.0)


@pytest.mark.parametrize(
    "parameters",
    [
        Parameters(sessions=10, training=9),
        Parameters(sessions=0),
        Parameters(quick=10_000, load=0.05),
        Parameters(sessions=3, training=100, load=4.0),
    ],
)
def test_impossible_parameters_are_refused(parameters: Parameters) -> None:
    with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
        generate(parameters)


def test_quantiles_are_log_linear_in_between() -> None:
    found = Quantiles(((0, 1), (0.5, 10), (1, 1000)))
    assert found.value(0.25) == pytest.approx(math.sqrt(10))
    assert found.value(0.75) == pytest.approx(100)
    assert (found.value(0), found.value(1)) == (1, 1000)
    average = math.fsum(found.value((i + 0.5) / 10_000) for i in range(10_000)) / 10_000
    assert found.mean() == pytest.approx(average, rel=1e-4)
    assert 15 < TRAINING.mean() < 18  # minutes; the pilot's one-GPU sessions have 7


@pytest.mark.parametrize(
    "knots", [((0, 1), (1, 0.5)), ((0, 0), (1, 1)), ((0.1, 1), (1, 2)), ((0, 1), (0.9, 2))]
)
def test_quantiles_that_do_not_rise_are_refused(knots: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rise"):
        Quantiles(knots)


def test_a_quantile_is_a_value_that_so_many_do_not_exceed() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [quantile(values, p) for p in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([], 0.5) == 0.0


def test_a_chain_that_is_cut_by_the_end_continues_at_the_beginning() -> None:
    cells = [Cell(5, 10), Cell(10, 10), Cell(20, 10)]
    assert week.placed(cells, 100, 0.1) == [[(10, 10), (30, 10), (60, 10)]]
    # The second would end at 102: it is placed at the beginning, and all are later by 8.
    assert week.placed(cells, 100, 0.72) == [[(80, 10)], [(0, 10), (30, 10)]]
    # Sixty seconds hold thirty of work and thirty of thinking; forty leave ten for thinking.
    (whole,) = week.placed(cells, 40, 0.0)
    assert whole == [(0, 10), (pytest.approx(40 / 3), 10), (pytest.approx(30), 10)]


def test_sessions_part_at_their_longest_absence_and_join_in_order() -> None:
    long = [(0.0, 10.0), (20.0, 10.0), (90.0, 10.0)]
    assert week.parted([long], 2) == [long[:2], long[2:]]
    assert week.parted([long[2:], long[:2]], 1) == [long]
    with pytest.raises(ValueError, match="So few sessions"):
        week.parted([[(0.0, 10.0)], [(5.0, 10.0)]], 1)


def test_written_workloads_are_read_again() -> None:
    made = generate(Parameters(sessions=6, training=80, load=0.6), 4)
    found = workload.read(workload.write(made))
    assert [each.name for each in found.sessions] == [each.name for each in made.sessions]
    for mine, theirs in zip(made.sessions, found.sessions, strict=True):
        assert theirs.memory == pytest.approx(mine.memory, abs=2)
        for a, b in zip(mine.cells, theirs.cells, strict=True):
            assert (b.think, b.duration) == pytest.approx((a.think, a.duration), abs=1e-4)


def test_rows_are_taken_in_the_order_of_their_starts() -> None:
    found = workload.read(
        [
            "session,num_gpu,start_min,dur_min\n",
            "b,1,4,1\r\n",
            "a,2,10,5\n",
            "\n",
            " a , 4 , 1 , 2 \n",
            "a,1,12,1\n",
        ]
    )
    a, b = found.sessions
    assert (a.name, a.gpus, a.memory) == ("a", 4, 8 * GB)
    # The third begins while the second still runs: no think time is left of it.
    assert a.cells == (Cell(60, 120), Cell(420, 300), Cell(0, 60))
    assert b.cells == (Cell(240, 60),)
    assert (found.cells, found.work, found.span) == (4, 4 * 480 + 60, 960)


def test_memory_is_the_most_that_a_row_names() -> None:
    lines = ["session,num_gpu,start_min,dur_min,memory_gb", "a,1,0,1,2", "a,1,5,1,3.5"]
    assert workload.read(lines).sessions[0].memory == 3_500_000_000


HEADER = "session,num_gpu,start_min,dur_min"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the header must be session,num_gpu,start_min,dur_min"),
        ("session,gpus,start,dur\na,1,0,1", "line 1: the header must be"),
        (f"{HEADER},memory_gb,more\n", "line 1: the header must be"),
        (HEADER, "line 1: there is no row"),
        (f"{HEADER}\na,1,0", "line 2: 4 fields are needed, there are 3"),
        (f"{HEADER}\n\na,1,0,1,8", "line 3: 4 fields are needed, there are 5"),
        (f"{HEADER}\n,1,0,1", "line 2: session is empty"),
        (f"{HEADER}\na,0,0,1", "line 2: num_gpu must be a whole number from 1, not 0"),
        (f"{HEADER}\na,1.5,0,1", "line 2: num_gpu must be a whole number from 1, not 1.5"),
        (f"{HEADER}\na,1,-1,1", "line 2: start_min must be a number from 0, not '-1'"),
        (f"{HEADER}\na,1,0,nan", "line 2: dur_min must be a number from 0, not 'nan'"),
        (f"{HEADER}\na,1,0,inf", "line 2: dur_min must be a number from 0, not 'inf'"),
        (f"{HEADER}\na,1e999,0,1", "line 2: num_gpu must be a number from 0"),
        (f"{HEADER}\na,1,0,1e8", "line 2: it is later or longer than 1e+07 minutes"),
        (f"{HEADER}\na,1,0,{'x' * 5000}", f"not '{'x' * 40}…'"),
        (f"{HEADER},memory_gb\na,1,0,1,-2", "line 2: memory_gb must be a number from 0"),
    ],
)
def test_hostile_files_are_refused_with_their_line(text: str, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload.read(text.splitlines())
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a,b", "a\nb"])
def test_names_that_no_file_can_hold_are_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="comma"):
        list(workload.write(Workload((session(name, (0, 1)),))))


def openb_lines(name: str) -> list[str]:
    return (OPENB / name).read_text("utf-8").splitlines(keepends=True)


def test_openb_matches_its_readme() -> None:
    lines = openb_lines("openb_gpu_pods.csv")
    assert openb.is_pods(lines[0])
    assert not openb.is_pods(HEADER)
    pods = openb.read_pods(lines)
    assert (len(pods), sum(pod.share < 1000 for pod in pods)) == (7064, 3078)
    nodes = openb.read_nodes(openb_lines("openb_gpu_nodes.csv"))
    assert (len(nodes), sum(nodes.values())) == (1213, 6212)
    found = openb.workload(pods, 16 * GB)
    ran = [pod for pod in pods if pod.scheduled is not None and pod.deleted > pod.scheduled]
    assert len(found.sessions) == found.cells == len(ran)
    second = next(each for each in found.sessions if each.name == "openb-pod-0001")
    assert (second.gpus, second.memory) == (1, 16 * GB * 460 // 1000)
    assert second.cells == (Cell(427_061, 12_902_960 - 427_061),)


PODS = "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,num_gpu\n", "line 1: there is no column gpu_milli"),
        (f"{PODS}\na,1,500", "line 2: a field is missing"),
        (f"{PODS}\na,1,5e2,0,1,0", "line 2: gpu_milli must be a whole number from 0, not '5e2'"),
        (f"{PODS}\na,1,1001,0,1,0", "line 2: 1 GPUs of 1001 thousandths cannot be"),
        (f"{PODS}\na,2,500,0,1,0", "line 2: 2 GPUs of 500 thousandths cannot be"),
        (f"{PODS}\na,1,500,0,9{'9' * 20},0", "deletion_time must be a whole number"),
    ],
)
def test_hostile_pods_are_refused_with_their_line(text: str, says: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        openb.read_pods(text.splitlines())
    assert says in str(caught.value)


def test_pods_that_never_ran_are_no_workload() -> None:
    pods = openb.read_pods([PODS, "a,1,500,0,9,", "b,0,0,0,9,1"])
    assert len(pods) == 1
    with pytest.raises(WorkloadError, match="no pod ran"):
        openb.workload(pods, GB)


def test_fractions_are_packed_by_hand() -> None:
    def pod(name: str, gpus: int, share: int) -> openb.Pod:
        return openb.Pod(name, gpus, share, 0.0, 1.0, 0.0)

    pods = [pod("a", 1, 500), pod("b", 1, 500), pod("c", 1, 1000), pod("d", 2, 1000)]
    # One node of two devices: a and b share one, c has the other, d finds nothing.
    best = pack(pods, [2], RULES["best-fit"])
    assert (best.placed, best.refused, best.allocated) == (3, 1, 1.0)
    # Two nodes: load balancing puts a and b onto different ones, and d has no node to itself.
    assert pack(pods, [2, 2], RULES["worst-fit"]).refused == 1
    fgd = pack(pods, [2, 2], RULES["fgd"])
    assert (fgd.placed, fgd.allocated, fgd.fragmented) == (4, 1.0, 0.0)


def test_steepest_descent_fragments_openb_less_than_balancing() -> None:
    pods = openb.read_pods(openb_lines("openb_gpu_pods.csv"))[::8]
    nodes = list(openb.read_nodes(openb_lines("openb_gpu_nodes.csv")).values())[::8]
    fgd, balanced = (pack(pods, nodes, RULES[name]) for name in ("fgd", "worst-fit"))
    assert fgd.fragmented < balanced.fragmented
    assert fgd.allocated > balanced.allocated
