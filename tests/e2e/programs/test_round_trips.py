"""The number of round trips of a notebook: one for each value that is read, never per operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "operators" / "trips.py"
TOKEN = ": a further token"


@pytest.fixture(scope="module")
def trips(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, float]]:
    """Return the number of requests for each value that is read, or for each further token."""
    runtime_dir = tmp_path_factory.mktemp("trips") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
        yield json.loads(line)


def test_a_read_or_printed_value_takes_one_round_trip(trips: dict[str, float]) -> None:
    reads = {name: count for name, count in trips.items() if not name.endswith(TOKEN)}
    assert {"item", "tolist", "repr", "repr of 200 x 200", "format"} <= set(reads)
    assert reads == dict.fromkeys(reads, 1)


def test_a_generated_token_takes_one_however_long_the_text_has_grown(
    trips: dict[str, float],
) -> None:
    tokens = {name: count for name, count in trips.items() if name.endswith(TOKEN)}
    assert len(tokens) >= 6
    # A token is read to check whether it ends the text, as without the proxy.
    assert max(tokens.values()) <= 1, tokens
