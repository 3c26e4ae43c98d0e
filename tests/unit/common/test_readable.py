"""Readable texts for ids and times."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from jupyter_sing.cli.output import SafeOutput
from jupyter_sing.notebook.status_text import Table
from kernelproxy.common.readable import (
    clock,
    device_label,
    device_name,
    devices_named,
    escaped,
    moment,
    quoted,
    turn,
    without_turn,
)


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu:0", "Simulated GPU 0"), ("cuda:12", "GPU 12"), (None, "no GPU"), ("other", "other")],
)
def test_devices_have_names(device: str | None, name: str) -> None:
    assert device_name(device) == name


def test_names_are_quoted_as_they_are_and_tables_line_up() -> None:
    assert quoted("実験\u3000it's 1.ipynb") == "'実験\u3000it's 1.ipynb'"
    assert quoted("a\x1b[31m\u202e") == "'a\\x1b[31m\\u202e'"
    names = ["実験\u30001", "nb\u00a0", "e\u0301", "👨\u200d👧", "1234567"]
    lines = str(Table(["n", "x"], [[each, "x"] for each in names])).splitlines()
    assert [line[:-1] for line in lines] == [
        "n        ", "実験\u30001  ", "nb\u00a0      ", "e\u0301        ",
        "👨\u200d👧     ", "1234567  ",
    ]  # fmt: skip


def test_ids_are_hints_beside_names() -> None:
    assert device_label("cpu:1") == "Simulated GPU 1 (cpu:1)"
    assert devices_named("It moves from cpu:0 to cuda:1.") == (
        "It moves from Simulated GPU 0 to GPU 1."
    )


@pytest.mark.parametrize(
    ("position", "seconds", "text"),
    [
        (1, 1.2, "You are next, about 1 s."),
        (1, 0.2, "You are next, any moment now."),
        (3, 200.0, "Place 3 in the queue, about 3 min."),
        (2, None, "Place 2 in the queue."),
    ],
)
def test_turns_are_listed_and_can_be_omitted(
    position: int, seconds: float | None, text: str
) -> None:
    assert turn(position, seconds) == text
    waits = "Waiting for Simulated GPU 0 (in use by bob)."
    assert without_turn(f"{waits} {text}") == waits


@pytest.fixture
def _tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_tokyo")
@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("2026-11-23T00:12Z", "09:12"),
        ("2026-11-22T14:59Z", "2026-11-22 23:59"),
        ("2026-99-23T00:12Z", "2026-99-23T00:12Z"),
    ],
)
def test_moments_are_read_on_the_readers_clock(said: str, read: str) -> None:
    now = datetime.fromisoformat("2026-11-23T01:00+09:00")
    text = "Idle. Suspends at %; nothing is lost."
    assert clock(text.replace("%", said), now) == text.replace("%", read)


def test_a_moment_is_written_to_be_read() -> None:
    at = datetime.fromisoformat("2026-11-23T09:12:59+00:00").timestamp()
    assert moment(at) == "2026-11-23T09:12Z"


def test_terminal_controls_are_escaped_and_letters_of_names_are_not() -> None:
    name = "実験\u3000\N{WOMAN}\u200d\N{PERSONAL COMPUTER}\xa0é"
    assert escaped(name) == name
    assert escaped("\x1b[2J\n\x9b\u202e\ud800") == r"\x1b[2J\n\x9b\u202e\ud800"
    assert escaped("a\nb\t", but="\n") == "a\nb\\t"
    shown = io.StringIO()
    SafeOutput(shown).write("a \x1b]0;title\x07\n")
    assert shown.getvalue() == "a \\x1b]0;title\\x07\n"
    assert str(Table(["x"], [["a\r\nb"]])) == "x\na\\r\\nb"
