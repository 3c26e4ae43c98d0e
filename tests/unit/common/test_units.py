"""Units of memory and time: cases that the panels' tests (format.spec.ts) check, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common import units

ROOT = Path(__file__).resolve().parents[3]
CASES: dict[str, list[Any]] = json.loads(
    (ROOT / "labextension/src/testing/units.json").read_text("utf-8")
)


@pytest.mark.parametrize(("count", "text"), CASES["bytes"])
def test_bytes_text_is_that_of_the_panels(count: int, text: str) -> None:
    assert units.bytes_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), CASES["durations"])
def test_duration_text_is_that_of_the_panels(seconds: float, text: str) -> None:
    assert units.duration_text(seconds) == text


@pytest.mark.parametrize(("part", "text"), CASES["percentages"])
def test_percent_text_is_that_of_the_panels(part: float, text: str) -> None:
    assert units.percent_text(part) == text


@pytest.mark.parametrize(("text", "count"), CASES["sizes"])
def test_parse_bytes_reads_binary_and_decimal_units(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("count", [3 << 10, 1536 << 10, 5 << 30])
def test_parse_bytes_reads_bytes_text(count: int) -> None:
    assert units.parse_bytes(units.bytes_text(count)) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400), ("2 d", 172800)],
)
def test_parse_duration_reads_short_units(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1 hour", "1h30m", "inf"])
def test_parse_duration_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time: write 90s, 10m or 2h"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "1 second"),
        (2.5, "2.5 seconds"),
        (60, "1 minute"),
        (600, "10 minutes"),
        (7200, "2 hours"),
    ],
)
def test_exact_duration_text_does_not_round(seconds: float, text: str) -> None:
    assert units.exact_duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (90, "90 s"), (600, "10 min"), (7200, "2 h")]
)
def test_interval_text_is_short_and_does_not_round(seconds: float, text: str) -> None:
    assert units.interval_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0004, "0.4 ms"), (1.25, "1.25 s"), (180, "3.0 min")]
)
def test_measured_text_keeps_three_digits(seconds: float, text: str) -> None:
    assert units.measured_text(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.35, "0.35 s"), (12.2, "12 s"), (1538, "1,538 s")])
def test_seconds_text_always_shows_seconds(seconds: float, text: str) -> None:
    assert units.seconds_text(seconds) == text


def test_mebibytes_text_rounds_up() -> None:
    assert units.mebibytes_text((1 << 30) + 1) == "1025 MiB"
