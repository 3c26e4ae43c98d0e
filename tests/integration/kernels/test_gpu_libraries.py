"""Libraries that use GPUs themselves compute right on a proxied device, or are refused.

`make test-libraries` installs them, gigabytes in all; libraries that are missing are not tested.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT, RunProgram, daemon_directory
from tests.decorated import decorated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "programs" / "operators" / "gpu_libraries.py"
#: Those that `make venv` does not install.
LIBRARIES = ("bitsandbytes", "cupy", "jax", "numba", "torch_scatter", "triton", "xformers")


@pytest.fixture(scope="module")
def errors(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, str]]:
    """Return the errors of all checks whose libraries are installed, by name."""
    if not any(importlib.util.find_spec(each) for each in LIBRARIES):
        pytest.skip("none of these libraries is installed: `make test-libraries` installs them")
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {"JUPYTER_SING_DEVICES": "cpu:1GiB@1", "OMP_NUM_THREADS": "1", "PYTHONPATH": search}
    runtime_dir = tmp_path_factory.mktemp("libraries") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name')]
        yield {result["name"]: result["error"] for result in found}


@pytest.mark.parametrize("name", decorated(PROGRAM, "check"))
def test_a_library_computes_right_or_is_refused(errors: dict[str, str], name: str) -> None:
    if name not in errors:
        pytest.skip("the library is not installed")
    if errors[name]:
        pytest.fail(errors[name], pytrace=False)
