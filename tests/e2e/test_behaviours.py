"""What programs do on the proxied device gives what it gives on the CPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS / "programs" / "behaviours.py"


def is_behaviour(node: ast.AST) -> bool:
    """Whether a node of a module's syntax tree is a function decorated with `behaviour`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(isinstance(name, ast.Name) and name.id == "behaviour" for name in names)


# Read from their text: importing torch here would be another, unproxied torch.
NAMES = [
    node.name
    for path in sorted((TESTS / "behaviours").glob("*.py"))
    for node in ast.parse(path.read_text("utf-8")).body
    if is_behaviour(node)
]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, dict[str, Any]]]:
    """Results by name: all behaviours, run one after the other in one session."""
    # As many threads on both sides, since sums are split among them.
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JUPYTER_SING_DEVICES": "cpu:2GiB@1"}
    runtime_dir = tmp_path_factory.mktemp("behaviours") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield {result["name"]: result for result in found}


@pytest.mark.parametrize("name", NAMES)
def test_behaviour(results: dict[str, dict[str, Any]], name: str) -> None:
    assert name in results, "the behaviour was not tried"
    if not results[name]["ok"]:
        pytest.fail(results[name]["message"], pytrace=False)


def test_nothing_else_was_compared(results: dict[str, dict[str, Any]]) -> None:
    assert sorted(results) == sorted(NAMES)
