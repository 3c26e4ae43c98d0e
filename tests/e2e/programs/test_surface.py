"""`torch.cuda` on a proxied device behaves as programs expect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunProgram, daemon_directory
from tests.decorated import decorated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = TESTS / "programs" / "operators" / "surface.py"
CHECKS = [
    name for path in sorted((TESTS / "surface").rglob("*.py")) for name in decorated(path, "check")
]


@pytest.fixture(scope="module")
def errors(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, str]]:
    """Return the errors of all checks, by name; they run in one session, one after the other."""
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


@pytest.mark.usefixtures("runtime_dir")
def test_every_public_name_does_what_the_page_documents(run_program: RunProgram) -> None:
    env = {"JUPYTER_SING_DEVICES": "cpu:2GiB"}
    done = run_program(PROGRAM.with_name("names.py"), proxied=True, env=env)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) > 150
    assert [name for name in found if name["error"]] == []
