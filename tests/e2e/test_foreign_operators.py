"""Operators of other libraries than torch run where the worker can import them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelproxy import control, native
from kernelproxy.protocol import Resume, SessionReply, Status, StatusReply, Suspend
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "programs" / "foreign.py"

COMPILED = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor twice_plus(const at::Tensor& x, int64_t more) { return x * 2 + more; }
at::Tensor positive(const at::Tensor& x) { return x.masked_select(x > 0); }
at::Tensor& fill(at::Tensor& x, double value) { return x.fill_(value); }

TORCH_LIBRARY(foreign, library) {
  library.def("twice_plus(Tensor x, int more) -> Tensor");
  library.def("positive(Tensor x) -> Tensor");
  library.def("fill_(Tensor(a!) x, float value) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(foreign, CPU, library) {
  library.impl("twice_plus", &twice_plus);
  library.impl("positive", &positive);
  library.impl("fill_", &fill);
}
"""

MODULE = """
import torch

torch.library.define("{name}::{operator}", "(Tensor x) -> Tensor")


@torch.library.impl("{name}::{operator}", "CPU")
def {operator}(x):
    return x * {times}
"""

Ask = Callable[[str], str]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a compiled library and two Python modules."""
    directory = tmp_path_factory.mktemp("foreign")
    source = directory / "foreign.cpp"
    source.write_text(COMPILED)
    info = native.find_torch(sys.executable)
    flags = [*native.COMPILE_FLAGS, "-O0", "-g0", "-w"]
    for include in info.include_directories:
        flags += ["-isystem", str(include)]
    links = [f"-L{info.library_directory}", "-ltorch_cpu", "-lc10"]
    output = ["-shared", "-o", str(directory / "libforeign.so")]
    subprocess.run([*native.compiler_command(), *flags, str(source), *output, *links], check=True)
    for name, operator, times in (
        ("foreign_operators", "thrice", 3),
        ("foreign_missing", "once", 1),
    ):
        text = MODULE.format(name=name, operator=operator, times=times)
        (directory / f"{name}.py").write_text(text)
    return directory


@pytest.fixture
def ask(libraries: Path, tmp_path: Path, runtime_dir: Path) -> Iterator[Ask]:
    """Order steps of a proxied program, in whose directory the modules lie."""
    directory = tmp_path / "own"
    shutil.copytree(libraries, directory)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_SING_DEVICES": "cpu:1GiB@1"}
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", str(PROGRAM), str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as program:
        assert program.stdin
        assert program.stdout
        assert program.stdout.readline() == "ready\n"

        def step(order: str) -> str:
            program.stdin.write(order + "\n")
            program.stdin.flush()
            return program.stdout.readline().rstrip("\n")

        yield step
        program.stdin.close()


def move_to_another_worker() -> None:
    with control.connect(start=False) as agent:
        (session,) = agent.expect(StatusReply, Status()).sessions
        agent.expect(SessionReply, Suspend(session["id"], "Suspended by a test"))
        agent.expect(SessionReply, Resume(session["id"]))


def test_operators_of_compiled_libraries_are_executed(ask: Ask) -> None:
    assert ask("compiled") == "True"
    assert ask("gradient") == "True"
    assert ask("dynamic") == "[True, True]"
    assert ask("in place") == "True"
    move_to_another_worker()  # which has not loaded it yet
    assert ask("gradient") == "True"
    assert ask("dynamic") == "[True, True]"


def test_operators_of_modules_are_executed(ask: Ask) -> None:
    assert ask("python") == "True"
    move_to_another_worker()
    assert ask("python") == "True"


def test_a_module_that_the_worker_lacks_is_named(ask: Ask) -> None:
    error = ask("missing")
    assert "the worker cannot import module foreign_missing" in error
    assert ask("python") == "True"  # and nothing else is lost


def test_operators_of_the_notebook_are_made_of_torch_s(ask: Ask) -> None:
    assert ask("custom") == "(True, True)"
    assert "foreign_notebook::once: it is defined in the notebook" in ask("notebook")
    assert ask("custom") == "(True, True)"
