"""Programs find on a proxied device what they expect of `torch.cuda`."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunProgram, daemon_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "surface.py"
# Read from its text: importing torch here would be another, unproxied torch.
CHECKS = [
    node.name
    for node in ast.parse(PROGRAM.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(d, ast.Name) and d.id == "check" for d in node.decorator_list)
]


@pytest.fixture(scope="module")
def errors(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, str]]:
    """Errors of all checks, by name; they run in one session, one after the other."""
    env = {"JUPYTER_SING_DEVICES": "cpu:2GiB"}
    runtime_dir = tmp_path_factory.mktemp("surface") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield {result["name"]: result["error"] for result in found}


@pytest.mark.parametrize("name", CHECKS)
def test_surface(errors: dict[str, str], name: str) -> None:
    assert name in errors, "the check did not run"
    if errors[name]:
        pytest.fail(errors[name], pytrace=False)
