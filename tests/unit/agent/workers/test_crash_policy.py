"""Handling of workers' deaths: one test for each row of the table in crash_policy.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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


def test_after_a_death_at_a_record_the_next_worker_is_careful_until_that_is_decided() -> None:
    deaths = CrashPolicy()
    careful = []
    for consumed in (8, 4, 4, 4):  # the first one was reported late
        careful.append(deaths.careful)
        deaths.note(consumed, head=80)
    assert careful == [False, True, True, True]
    assert deaths.skip == [4]
    assert not deaths.careful
    deaths.note(8, 80, -signal.SIGKILL)
    assert not deaths.careful


def test_a_signal_from_outside_is_no_records_fault() -> None:
    deaths = CrashPolicy()
    for _ in range(2 * SAME_RECORD_MAX):
        assert deaths.note(8, 80, -signal.SIGKILL) is Verdict.RETRY
    assert deaths.note(8, 80, -signal.SIGSEGV) is Verdict.RETRY
    assert deaths.skip == []


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
