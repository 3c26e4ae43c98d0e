"""Time to GPU: counting and display."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jupyter_sing.controller.time_to_gpu import BOUNDS, RECENT, TimeToGpu, WaitTimes
from jupyter_sing.notebook import status_text
from jupyter_sing.server import metrics
from kernelproxy.common.protocol.views import SharingView

SECONDS = st.floats(0.0, 1e5)


@given(st.lists(SECONDS, max_size=50))
def test_wait_is_counted_in_one_histogram_class(waits: list[float]) -> None:
    counted = WaitTimes()
    for each in waits:
        counted.note(each)
    found = counted.figures()
    assert found["count"] == len(waits)
    for bound, count in found["classes"]:
        assert count == sum(bound is None or each <= bound for each in waits)
    if waits:
        assert min(waits) <= found["p50"] <= found["p99"] <= max(waits)


def test_quantiles_are_those_of_recent_waits() -> None:
    counted = WaitTimes()
    for _ in range(RECENT):
        counted.note(100.0)
    for _ in range(RECENT):
        counted.note(1.0)
    found = counted.figures()
    assert (found["p50"], found["p99"], found["count"]) == (1.0, 1.0, 2 * RECENT)


def test_wait_of_a_cell_ends_when_it_first_executes() -> None:
    waits = TimeToGpu()
    waits.begin("a", 10.0)
    waits.end("a", "basic", 12.0)
    waits.end("a", "basic", 20.0)  # again, after its turn ended
    waits.begin("b", 10.0)
    waits.forget("b")
    waits.end("b", "basic", 11.0)
    found = waits.figures()
    assert list(found) == ["basic"]
    assert (found["basic"]["count"], found["basic"]["seconds"]) == (1, 2.0)


def sharing() -> SharingView:
    waits = TimeToGpu()
    for index, tier in enumerate(("basic", "basic", "premium")):
        waits.begin("a", 0.0)
        waits.end("a", tier, 0.25 + index)
    return {
        "time_to_gpu": waits.figures(),
        "preemptions": 3,
        "switches": 2,
        "evictions": 1,
        "migrations": 0,
        "tier_violations": 4,
        "served": {"lab": {"ada": 1.5}},
    }


def test_status_text_shows_waits_and_tier_violations() -> None:
    assert status_text.waits_line(sharing()) == (
        "Time to GPU: basic: median 1.25 s, p99 1.25 s of 2 cells; "
        "premium: median 2.25 s, p99 2.25 s of 1 cell\n"
        "Below the guaranteed share of their tier: 4 session-hours."
    )
    assert status_text.waits_line({}) == ""


def test_metrics_have_waits_and_decisions() -> None:
    text = metrics.render([], [], sharing()).decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["sing_time_to_gpu_seconds_count", "basic"] == 2
    assert samples["sing_time_to_gpu_seconds_bucket", "+Inf", "premium"] == 1
    assert samples["sing_time_to_gpu_seconds_bucket", "0.5", "basic"] == 1
    assert samples["sing_tier_violations_total",] == 4
    assert samples["sing_user_gpu_seconds_total", "ada", "lab"] == 1.5
    assert len([key for key in samples if key[0] == "sing_time_to_gpu_seconds_bucket"]) == 2 * (
        len(BOUNDS) + 1
    )
