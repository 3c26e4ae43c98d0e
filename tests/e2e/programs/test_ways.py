"""Every operator with a CUDA kernel is executed, or refused in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.refused import CUDA_ONLY
from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "operators" / "ways.py"


@pytest.fixture(scope="module")
def lines(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[list[dict[str, Any]]]:
    """Return the program's result for each operator."""
    runtime_dir = tmp_path_factory.mktemp("ways") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True, env={"JUPYTER_SING_DEVICES": "cpu:2GiB"})
        yield [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_operators_missing_on_software_devices_are_listed(lines: list[dict[str, Any]]) -> None:
    found = {line["name"].removeprefix("aten::"): line for line in lines if "way" in line}
    assert len(found) > 1000
    missing = {name for name, line in found.items() if not line["executes"]}
    unlisted = {name for name in missing if not any(re.fullmatch(e, name) for e in CUDA_ONLY)}
    assert unlisted == set()
    unused = {each for each in CUDA_ONLY if not any(re.fullmatch(each, name) for name in missing)}
    assert unused == set()


def test_operators_execute_on_the_device_whole_or_composed_of_others(
    lines: list[dict[str, Any]],
) -> None:
    ways = {line["way"] for line in lines if "way" in line}
    assert ways <= {"kernel", "composite", "fallback"}


def test_a_refusal_is_one_sentence_that_names_the_operator(lines: list[dict[str, Any]]) -> None:
    refusals = {line["name"]: line["error"] for line in lines if "error" in line}
    assert len(refusals) >= 4
    for name, error in refusals.items():
        assert error.startswith(f"NotImplementedError: aten::{name}: torch has no kernel")
        assert len(error.splitlines()) == 1
