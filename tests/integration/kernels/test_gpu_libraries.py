"""Libraries that use GPUs themselves compute right on a proxied device, or are refused.

`make test-libraries` installs them, gigabytes in all; libraries that are missing are not tested.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT, RunProgram, daemon_directory
from tests.decorated import decorated
from tests.doubles import flash_attn

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "programs" / "operators" / "gpu_libraries.py"


@pytest.fixture(scope="module")
def errors(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, str]]:
    """Return the errors of all checks whose libraries are installed, by name."""
    directory = tmp_path_factory.mktemp("libraries")
    double = flash_attn.build(directory / "flash_attn")
    search = os.pathsep.join([str(ROOT), str(double), os.environ.get("PYTHONPATH", "")])
    env = {"JUPYTER_SING_DEVICES": "cpu:1GiB@1", "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    with pytest.MonkeyPatch.context() as patch, daemon_directory(directory / "runtime", patch):
        done = run_program(PROGRAM, proxied=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name')]
        yield {result["name"]: result["error"] for result in found}


@pytest.mark.parametrize("name", decorated(PROGRAM, "check"))
def test_a_library_computes_right_or_is_refused(errors: dict[str, str], name: str) -> None:
    if name not in errors:
        pytest.skip("the library is not installed: `make test-libraries` installs it")
    if errors[name]:
        pytest.fail(errors[name], pytrace=False)
