"""In builds of torch with CUDA, only a GPU's worker ever opens the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.native import build, compiler
from tests.conftest import RunProgram
from tests.decorated import decorated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
PROGRAMS = TESTS / "programs" / "operators"
HAS_CUDA = (build.describe().directory / "lib" / "libtorch_cuda.so").exists()


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """Return variables that install a driver stub, which records the processes that use it."""
    if not HAS_CUDA:
        pytest.skip("this torch was built without CUDA: try `make test-torch`")
    directory = tmp_path / "driver"
    directory.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        source = TESTS / "doubles" / "driver.c"
        command = [*compiler.compiler_command(), "-x", "c", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(directory / name)], check=True)
    path = os.pathsep.join([str(directory), os.environ.get("LD_LIBRARY_PATH", "")])
    log = str(tmp_path / "driver.log")
    return {"LD_LIBRARY_PATH": path.rstrip(os.pathsep), "DRIVER_LOG": log}


def used(driver: dict[str, str]) -> str:
    log = Path(driver["DRIVER_LOG"])
    return log.read_text() if log.exists() else ""


def test_plain_torch_is_seen_to_use_it(driver: dict[str, str]) -> None:
    code = "import torch; print(torch.cuda.is_available())"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **driver}, check=True)
    assert "cuInit" in used(driver)


# Kineto counts GPUs when a profile is created, whatever is to be profiled; it opens none. Children
# that are not forked are processes without a session.
ASKING = [
    *decorated(TESTS / "surface" / "execution" / "profiling.py", "check"),
    "a_spawned_child_has_no_device_but_gets_tensors_of_the_host",
    "loaders_work_however_their_workers_start",
]


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize(
    "program",
    [("surface.py", "--leave-out", *ASKING), ("behaviours.py",)],
    ids=["surface", "behaviours"],
)
def test_the_driver_is_not_used_under_a_session(
    driver: dict[str, str], run_program: RunProgram, program: tuple[str, ...]
) -> None:
    name, *arguments = program
    env = {**driver, "JUPYTER_SING_DEVICES": "cpu:2GiB@1", "OMP_NUM_THREADS": "1"}
    done = run_program(PROGRAMS / name, *arguments, proxied=True, env=env)
    assert done.stdout
    assert used(driver) == ""
