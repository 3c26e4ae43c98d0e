"""What the deaths of workers mean: one test for each row of the table in recovery.py."""

from __future__ import annotations

import signal

from kernelproxy.agent.recovery import FRUITLESS_MAX, SAME_RECORD_MAX, Deaths, Verdict


def test_a_death_with_nothing_to_execute_is_no_records_fault() -> None:
    deaths = Deaths()
    for _ in range(SAME_RECORD_MAX + 2):
        assert deaths.note(consumed=80, head=80) is Verdict.RETRY
    assert deaths.skip == []


def test_the_third_death_in_a_row_at_a_record_skips_it() -> None:
    deaths = Deaths()
    verdicts = [deaths.note(consumed=8, head=80) for _ in range(SAME_RECORD_MAX)]
    assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.SKIP]
    assert deaths.skip == [8]


def test_after_a_death_at_a_record_the_next_worker_is_careful_until_that_is_decided() -> None:
    deaths = Deaths()
    careful = []
    for consumed in (8, 4, 4, 4):  # the first was told late
        careful.append(deaths.careful)
        deaths.note(consumed, head=80)
    assert careful == [False, True, True, True]
    assert deaths.skip == [4]
    assert not deaths.careful
    deaths.note(8, 80, -signal.SIGKILL)
    assert not deaths.careful


def test_a_signal_from_outside_is_no_records_fault() -> None:
    deaths = Deaths()
    for _ in range(2 * SAME_RECORD_MAX):
        assert deaths.note(8, 80, -signal.SIGKILL) is Verdict.RETRY
    assert deaths.note(8, 80, -signal.SIGSEGV) is Verdict.RETRY
    assert deaths.skip == []


def test_deaths_at_other_records_between_start_the_count_anew() -> None:
    deaths = Deaths()
    for consumed in (8, 8, 16, 8, 8, 16):
        assert deaths.note(consumed, head=80) is Verdict.RETRY
    assert deaths.skip == []


def test_several_records_can_be_skipped() -> None:
    deaths = Deaths()
    for consumed in (8, 8, 8, 16, 16, 16):
        deaths.note(consumed, head=80)
    assert deaths.skip == [8, 16]


def test_a_record_that_kills_though_it_is_skipped_ends_the_session() -> None:
    deaths = Deaths()
    verdicts = [deaths.note(consumed=8, head=80) for _ in range(2 * SAME_RECORD_MAX)]
    assert verdicts[-1] is Verdict.FAIL


def test_dying_without_progress_ends_the_session() -> None:
    deaths = Deaths()
    verdicts = [deaths.note(consumed=80, head=80) for _ in range(FRUITLESS_MAX)]
    assert verdicts[:-1] == [Verdict.RETRY] * (FRUITLESS_MAX - 1)
    assert verdicts[-1] is Verdict.FAIL


def test_dying_with_progress_never_does() -> None:
    deaths = Deaths()
    for consumed in range(0, 8 * 10 * FRUITLESS_MAX, 8):
        assert deaths.note(consumed, head=1 << 20) is Verdict.RETRY


def test_records_below_a_snapshot_are_forgotten() -> None:
    deaths = Deaths()
    for consumed in (8, 8, 8, 16, 16, 16):
        deaths.note(consumed, head=80)
    deaths.forget_before(16)
    assert deaths.skip == [16]
