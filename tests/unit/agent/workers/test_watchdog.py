"""Watchdog: which workers hang, which are busy, and the timeouts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kernelproxy.agent.workers.watchdog import (
    DOUBLINGS_MAX,
    ProcessActivity,
    StoppedTime,
    Watchdog,
    WatchedWait,
    activity,
)


def wait(watchdog: Watchdog, bounded: bool = True) -> WatchedWait:
    return WatchedWait(watchdog, bounded=bounded, now=0.0)


@pytest.mark.parametrize(
    ("state", "what"), [("T", "was stopped by a signal"), ("S", "did nothing")]
)
def test_a_process_without_processor_time_hangs(state: str, what: str) -> None:
    waiting = wait(Watchdog(5.0, 100.0))
    for now in (0.5, 4.9):
        assert waiting.check(now, ProcessActivity(state, 7.0)) == ""
    assert waiting.check(5.0, ProcessActivity(state, 7.0)) == (
        f"Its device process {what} while others waited for 5 s"
    )


def test_a_tick_now_and_then_is_work() -> None:
    waiting = wait(Watchdog(5.0, 100.0))
    for count in range(24):
        assert waiting.check(count * 4.0, ProcessActivity("S", count * 0.01)) == ""
    assert (
        waiting.check(100.0, ProcessActivity("S", 1.0))
        == "One operation kept others waiting for 100 s"
    )


@pytest.mark.parametrize("state", ["R", "D"])
def test_a_process_that_waits_for_a_processor_or_the_system_works(state: str) -> None:
    waiting = wait(Watchdog(5.0, 100.0))
    assert waiting.check(50.0, ProcessActivity(state, 7.0)) == ""
    assert waiting.check(100.0, ProcessActivity(state, 7.0)) != ""


def test_an_order_with_a_limit_of_its_own_is_not_limited_while_it_works() -> None:
    waiting = wait(Watchdog(5.0, 100.0), bounded=False)
    assert waiting.check(1000.0, ProcessActivity("R", 7.0)) == ""
    assert waiting.check(1005.0, ProcessActivity("S", 7.0)) != ""


def test_patience_doubles_with_every_loss_up_to_a_limit() -> None:
    watchdog = Watchdog(5.0, 100.0)
    waiting = wait(watchdog)
    for count in range(DOUBLINGS_MAX + 3):
        assert watchdog.still_seconds == 5.0 * 2 ** min(count, DOUBLINGS_MAX)
        assert watchdog.busy_seconds == 100.0 * 2 ** min(count, DOUBLINGS_MAX)
        watchdog.lose()
    assert waiting.check(100.0, ProcessActivity("S", 7.0)) == ""


def test_a_stopped_process_with_work_gets_longer_without_waiters() -> None:
    watch, stopped = StoppedTime(Watchdog(5.0, 100.0)), ProcessActivity("T", 7.0)
    assert watch.check(0.0, stopped) == ""
    assert watch.check(59.0, None) == ""  # it had no work meanwhile
    assert watch.check(60.0, stopped) == ""
    assert watch.check(119.0, ProcessActivity("t", 7.0)) == ""
    assert watch.check(120.0, stopped) == ""
    assert watch.check(179.0, stopped) == ""
    assert watch.check(180.0, stopped) == "Its device process was stopped by a signal for 60 s"


def test_the_activity_of_a_process_is_observed() -> None:
    program = "import signal, sys\nprint(flush=True)\nsys.stdin.read(1)\nwhile True: pass"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        while (asleep := activity(process.pid)) is None or asleep.state != "S":
            pass
        process.stdin.write(b".")
        process.stdin.flush()
        while (busy := activity(process.pid)) is None or busy.seconds <= asleep.seconds + 0.05:
            pass
        os.kill(process.pid, signal.SIGSTOP)
        while (stopped := activity(process.pid)) is None or stopped.state != "T":
            pass
        process.kill()
    assert activity(process.pid) is None


def test_a_process_that_waits_for_a_working_one_works() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        while (waiting := activity(process.pid)) is None or waiting.state != "S":
            pass
        while (later := activity(process.pid)) is None or later.seconds <= waiting.seconds + 0.05:
            pass
        os.killpg(process.pid, signal.SIGKILL)
    assert activity(process.pid) is None
