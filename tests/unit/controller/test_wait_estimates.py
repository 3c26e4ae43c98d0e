"""Messages to waiting sessions."""

from __future__ import annotations

import math

import pytest

from jupyter_sing.controller.wait_estimates import WaitEstimates
from jupyter_sing.scheduler.explain.explain import ExplainedWait
from kernelproxy.common.readable import soon


class Forecasts:
    """Counts the queries of an engine's outlook, at a clock that tests set."""

    def __init__(self, **found: ExplainedWait) -> None:
        self.found, self.now, self.count = found, 0.0, 0
        self.outlooks = WaitEstimates(self.forecast, self.named, lambda: self.now)

    def forecast(self, now: float) -> dict[str, ExplainedWait]:
        self.count += 1
        return self.found

    def named(self, clause: str, session: str) -> str:
        return clause.replace("ID", "train.ipynb" if session == "mine" else "bob")

    def said(self, session: str) -> str:
        found = self.outlooks.of(session)
        assert found is not None
        return found.reason


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "any moment now"),
        (0.8, "about 1 s"),
        (1.2, "about 1 s"),
        (89.0, "about 89 s"),
        (100.0, "about 2 min"),
        (5000.0, "about 83 min"),
        (7200.0, "about 2 h"),
    ],
)
def test_times_are_no_more_precise_than_they_can_be(seconds: float, words: str) -> None:
    assert soon(seconds) == words


def test_place_wait_and_device_are_in_one_sentence() -> None:
    first = ExplainedWait(1, 4.2, "2 sessions wait for 1 device", "Simulated GPU 0 (in use by ID)")
    forecasts = Forecasts(mine=first, others=first, last=ExplainedWait(3, 12.0, "ID stops first"))
    assert forecasts.said("mine") == (
        "Waiting for Simulated GPU 0 (in use by train.ipynb). You are next, about 4 s."
    )
    assert "(in use by bob)" in forecasts.said("others")
    assert forecasts.said("last") == (
        "Waiting for its turn: bob stops first. Place 3 in the queue, about 12 s."
    )
    assert forecasts.outlooks.of("nobody") is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "Waiting for its turn: Room. You are next."),
        (math.inf, "Cannot run: Room."),
    ],
)
def test_an_unknown_wait_is_not_estimated(seconds: float | None, words: str) -> None:
    forecasts = Forecasts(mine=ExplainedWait(1, seconds, "Room"))
    found = forecasts.outlooks.of("mine")
    assert found is not None
    assert (found.position, found.seconds, found.reason) == (1, None, words)


def test_estimates_for_all_sessions_query_the_engine_once() -> None:
    forecasts = Forecasts(mine=ExplainedWait(1, 1.0, "Room"), others=ExplainedWait(2, 2.0, "Room"))
    for session in forecasts.outlooks.waiting():
        forecasts.said(session)
    assert forecasts.count == 1
    forecasts.outlooks.forget()  # an event has happened
    forecasts.said("mine")
    assert forecasts.count == 2
    forecasts.now += 1.0
    forecasts.said("mine")
    assert forecasts.count == 3
