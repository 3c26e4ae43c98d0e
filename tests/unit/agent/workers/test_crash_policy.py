"""Handling of workers' deaths: one test for each row of the table in crash_policy.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kernelproxy.agent.workers.crash_policy import (
    AT_ONCE_MAX,
    KILLS_MAX,
    PAUSE_OF_DEATHS_MAX,
    SAME_RECORD_MAX,
    CrashPolicy,
    Verdict,
    pause,
)
from kernelproxy.agent.workers.oom_kills import OomKills
from kernelproxy.common.protocol import EXIT_DEVICE_LOST, EXIT_NO_ROOM, DeviceLost


def test_a_death_with_nothing_to_execute_is_no_records_fault() -> None:
    deaths = CrashPolicy()
    for _ in range(SAME_RECORD_MAX + 2):
        assert deaths.note(consumed=80, head=80) is Verdict.RETRY
    assert deaths.skip == []


def test_the_third_death_in_a_row_at_a_record_skips_it() -> None:
    deaths = CrashPolicy()
    verdicts = [deaths.note(consumed=8, head=80) for _ in range(SAME_RECORD_MAX)]
    assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.SKIP]
    assert deaths.skip == [8]


def test_after_a_death_at_a_record_the_next_worker_is_careful_up_to_there() -> None:
    deaths = CrashPolicy()
    careful = []
    for consumed in (8, 4, 4, 4):  # the first one was reported late
        careful.append(deaths.careful_until)
        deaths.note(consumed, head=80)
    assert careful == [0, 9, 9, 9]
    assert deaths.skip == [4]
    deaths.note(4, 80, -signal.SIGKILL)
    assert deaths.careful_until == 9
    deaths.note(16, 80, -signal.SIGKILL)
    assert deaths.careful_until == 0


ASSERTED = DeviceLost(710, "CUDA error: device-side assert triggered", "aten::add")
UNCORRECTABLE = DeviceLost(214, "CUDA error: uncorrectable ECC error encountered", "")
UNKNOWN = DeviceLost(0, "The device rejected all further work.", "")


@pytest.mark.parametrize(
    ("noticed", "head", "careful"),
    [
        pytest.param(80, 80, 80, id="unread: the worker was idle"),
        pytest.param(48, 80, 49, id="at a later record"),
        pytest.param(16, 80, 17, id="at its own record"),
    ],
)
def test_a_lost_device_costs_two_careful_workers_and_the_record_at_fault(
    noticed: int, head: int, careful: int
) -> None:
    deaths = CrashPolicy()
    assert deaths.note(noticed, head, EXIT_DEVICE_LOST, lost=ASSERTED) is Verdict.RETRY
    assert (deaths.skip, deaths.careful_until) == ([], careful)
    assert deaths.note(16, head, EXIT_DEVICE_LOST, lost=ASSERTED) is Verdict.SKIP
    assert deaths.skip == [16]
    assert deaths.reasons() == [ASSERTED.message]
    assert deaths.careful_until == careful  # another fault may follow
    assert deaths.pause == 0.0
    deaths.forget_before(head)
    assert deaths.careful_until == 0


def test_each_of_several_faults_costs_one_more_careful_worker() -> None:
    deaths = CrashPolicy()
    noted = [deaths.note(at, 80, EXIT_DEVICE_LOST, lost=ASSERTED) for at in (80, 16, 24, 72)]
    assert noted == [Verdict.RETRY, Verdict.SKIP, Verdict.SKIP, Verdict.SKIP]
    assert deaths.skip == [16, 24, 72]


def test_an_error_that_does_not_come_again_skips_nothing() -> None:
    for lost in (ASSERTED, UNCORRECTABLE, UNKNOWN):
        deaths = CrashPolicy()
        assert deaths.note(48, 80, EXIT_DEVICE_LOST, lost=lost) is Verdict.RETRY
        assert deaths.note(80, 88, EXIT_DEVICE_LOST, lost=lost) is Verdict.RETRY  # it was passed
        assert deaths.skip == []


def test_faults_of_the_hardware_never_blame_a_record() -> None:
    deaths = CrashPolicy()
    deaths.note(48, 80, EXIT_DEVICE_LOST, lost=ASSERTED)
    for _ in range(5 * KILLS_MAX):
        assert deaths.note(16, 80, EXIT_DEVICE_LOST, lost=UNCORRECTABLE) is Verdict.RETRY
    assert deaths.pause == PAUSE_OF_DEATHS_MAX
    assert deaths.skip == []


def test_a_device_without_room_for_a_replay_blames_no_record() -> None:
    deaths, pauses = CrashPolicy(), []
    for _ in range(8):
        assert deaths.note(16, 80, EXIT_NO_ROOM, without_room=True) is Verdict.RETRY
        pauses.append(deaths.pause)
    assert pauses == [pause(times, PAUSE_OF_DEATHS_MAX) for times in range(1, 9)]
    assert (deaths.skip, deaths.careful_until) == ([], 0)


def test_a_device_that_is_lost_for_no_known_cause_blames_the_third_time() -> None:
    deaths = CrashPolicy()
    noted = [deaths.note(16, 80, EXIT_DEVICE_LOST, lost=UNKNOWN) for _ in range(8)]
    assert noted[:4] == [Verdict.RETRY] * 3 + [Verdict.SKIP]
    assert Verdict.FAIL not in noted
    assert deaths.reasons() == [UNKNOWN.message]


def test_a_device_that_is_lost_where_nothing_is_executed_blames_no_record() -> None:
    deaths = CrashPolicy()
    for _ in range(2 * KILLS_MAX):
        assert deaths.note(80, 80, EXIT_DEVICE_LOST, lost=ASSERTED) is Verdict.RETRY
    assert deaths.skip == []
    assert deaths.pause == PAUSE_OF_DEATHS_MAX


def test_another_agent_is_as_careful_and_says_the_same() -> None:
    deaths, next_deaths = CrashPolicy(), CrashPolicy()
    for at in (80, 16):
        deaths.note(at, 80, EXIT_DEVICE_LOST, lost=ASSERTED)
    next_deaths.recover(deaths.skip, deaths.starved, deaths.reasons(), deaths.careful_until)
    assert (next_deaths.skip, next_deaths.careful_until) == ([16], 80)
    assert next_deaths.reasons() == [ASSERTED.message]


def test_a_signal_from_outside_is_no_records_fault() -> None:
    deaths = CrashPolicy()
    for _ in range(2 * SAME_RECORD_MAX):
        assert deaths.note(8, 80, -signal.SIGKILL) is Verdict.RETRY
    assert deaths.note(8, 80, -signal.SIGSEGV) is Verdict.RETRY
    assert deaths.skip == []


def test_a_death_with_others_counts_against_no_record_and_the_next_worker_is_alone() -> None:
    deaths = CrashPolicy()
    assert deaths.may_share(0)
    for _ in range(2 * SAME_RECORD_MAX):
        deaths.fell_with_others(8, suspect=True)
        assert not deaths.may_share(8)
        assert deaths.may_share(16)
    verdicts = [deaths.note(consumed=8, head=80) for _ in range(SAME_RECORD_MAX)]
    assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.SKIP]
    assert not deaths.may_share(8)


def test_a_death_with_others_by_the_fault_of_another_changes_nothing() -> None:
    deaths = CrashPolicy()
    deaths.fell_with_others(8, suspect=False)
    assert deaths.may_share(8)
    deaths.fell_with_others(8, suspect=True)
    deaths.fell_with_others(8, suspect=False)
    assert not deaths.may_share(8)


def test_deaths_at_other_records_between_start_the_count_anew() -> None:
    deaths = CrashPolicy()
    for consumed in (8, 8, 16, 8, 8, 16):
        assert deaths.note(consumed, head=80) is Verdict.RETRY
    assert deaths.skip == []


def test_several_records_can_be_skipped() -> None:
    deaths = CrashPolicy()
    for consumed in (8, 8, 8, 16, 16, 16):
        deaths.note(consumed, head=80)
    assert deaths.skip == [8, 16]


def test_a_record_that_kills_though_it_is_skipped_ends_the_session() -> None:
    deaths = CrashPolicy()
    verdicts = [deaths.note(consumed=8, head=80) for _ in range(2 * SAME_RECORD_MAX)]
    assert verdicts[-1] is Verdict.FAIL


def test_dying_without_progress_is_followed_by_longer_and_longer_pauses_and_never_ends() -> None:
    deaths = CrashPolicy()
    pauses = []
    for _ in range(1000):
        assert deaths.note(consumed=80, head=80) is Verdict.RETRY
        pauses.append(deaths.pause)
    assert pauses[:AT_ONCE_MAX] == [0.0] * AT_ONCE_MAX
    assert pauses[AT_ONCE_MAX:] == sorted(pauses[AT_ONCE_MAX:])
    assert pauses[AT_ONCE_MAX] == 1.0
    assert pauses[-1] == PAUSE_OF_DEATHS_MAX


def test_after_progress_the_next_worker_is_started_at_once() -> None:
    deaths = CrashPolicy()
    for consumed in range(0, 8000, 8):
        assert deaths.note(consumed, 1 << 20, -signal.SIGKILL) is Verdict.RETRY
        assert deaths.pause == 0.0


def test_a_record_that_wants_more_memory_than_there_is_is_skipped_after_pauses() -> None:
    deaths, pauses = CrashPolicy(), []
    for verdict in (Verdict.RETRY, Verdict.RETRY, Verdict.SKIP):
        assert deaths.note(8, 80, -signal.SIGKILL, starved=True) is verdict
        pauses.append(deaths.pause)
    assert pauses == [1.0, 2.0, 0.0]
    assert (deaths.skip, deaths.starved) == ([8], [8])
    deaths.forget_before(16)
    assert (deaths.skip, deaths.starved) == ([], [])


def test_want_of_memory_at_a_record_that_is_skipped_already_ends_nothing() -> None:
    deaths = CrashPolicy()
    verdicts = [deaths.note(8, 80, -signal.SIGKILL, starved=True) for _ in range(50)]
    assert verdicts.count(Verdict.SKIP) == 1
    assert Verdict.FAIL not in verdicts
    assert deaths.pause == PAUSE_OF_DEATHS_MAX


def test_kills_at_a_record_that_is_skipped_already_end_nothing() -> None:
    deaths = CrashPolicy()
    verdicts = [deaths.note(8, 80, -signal.SIGKILL) for _ in range(5 * KILLS_MAX)]
    assert verdicts.count(Verdict.SKIP) == 1
    assert Verdict.FAIL not in verdicts
    assert deaths.pause == PAUSE_OF_DEATHS_MAX


def test_kills_at_one_record_for_more_than_a_minute_are_no_accident() -> None:
    deaths, seconds = CrashPolicy(), 0.0
    for _ in range(KILLS_MAX - 1):
        assert deaths.note(8, 80, -signal.SIGKILL) is Verdict.RETRY
        seconds += deaths.pause
    assert seconds > 60
    assert deaths.note(8, 80, -signal.SIGKILL) is Verdict.SKIP
    assert (deaths.skip, deaths.starved) == ([8], [])


def test_kills_at_different_records_blame_none() -> None:
    deaths = CrashPolicy()
    for consumed in [8] * (KILLS_MAX - 1) + [16, 8] * KILLS_MAX:
        assert deaths.note(consumed, 80, -signal.SIGKILL) is Verdict.RETRY


def test_pauses_between_attempts_grow_to_a_minute() -> None:
    assert [pause(times) for times in (1, 2, 3, 7, 1000)] == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_the_system_names_the_process_killed_for_memory(tmp_path: Path) -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    machine = tmp_path / "vmstat"
    machine.write_text("oom_kill 4\n")
    lacking = OomKills(os.getpid(), tmp_path / "none", machine)
    assert not lacking.happened()
    machine.write_text("oom_kill 5\n")
    assert lacking.happened()
    for line in own:  # a group's own counter takes precedence
        number, controllers, path = line.split(":", 2)
        two = number == "0"
        if not two and "memory" not in controllers.split(","):
            continue
        groups = tmp_path / f"groups{number}"
        directory = (groups if two else groups / "memory") / path.lstrip("/")
        directory.mkdir(parents=True)
        counts = directory / ("memory.events" if two else "memory.oom_control")
        counts.write_text("max 3\noom_kill 0\n")
        watched = OomKills(os.getpid(), groups, machine)
        machine.write_text("oom_kill 9\n")
        assert not watched.happened()
        counts.write_text("max 3\noom_kill 1\n")
        assert watched.happened()


def test_records_below_a_snapshot_are_dropped() -> None:
    deaths = CrashPolicy()
    for consumed in (8, 8, 8, 16, 16, 16):
        deaths.note(consumed, head=80)
    deaths.forget_before(16)
    assert deaths.skip == [16]
