"""Pauses before the next agent is started after one that died."""

from __future__ import annotations

from kernelproxy.agent.supervisor.supervisor import (
    AT_ONCE_MAX,
    LIVED_SECONDS,
    PAUSE_MAX,
    TRIED_SECONDS,
    RestartPauses,
)


def test_the_first_are_replaced_at_once_and_then_with_growing_pauses_for_half_an_hour() -> None:
    series, now, pauses = RestartPauses(0.0), 1.0, []
    while (pause := series.pause(now)) is not None:
        pauses.append(pause)
        now += pause + 0.5
    assert pauses[:AT_ONCE_MAX] == [0.0] * AT_ONCE_MAX
    assert pauses[AT_ONCE_MAX : AT_ONCE_MAX + 6] == [1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_MAX]
    assert TRIED_SECONDS <= now <= TRIED_SECONDS + PAUSE_MAX + 2


def test_an_agent_that_lived_for_a_while_is_replaced_at_once() -> None:
    series, now = RestartPauses(0.0), 0.0
    for _ in range(1000):
        now += LIVED_SECONDS
        assert series.pause(now) == 0.0
