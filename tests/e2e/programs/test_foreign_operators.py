"""Operators of other libraries than torch run where the worker can import them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Resume, SessionReply, StatusReply, StatusRequest, Suspend
from kernelproxy.native import build as native
from kernelproxy.native import compiler
from tests.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAM = ROOT / "tests" / "programs" / "operators" / "foreign.py"

COMPILED = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor twice_plus(const at::Tensor& x, int64_t more) { return x * 2 + more; }
at::Tensor positive(const at::Tensor& x) { return x.masked_select(x > 0); }
at::Tensor& fill(at::Tensor& x, double value) { return x.fill_(value); }
std::tuple<at::Tensor, std::optional<at::Tensor>> beyond(const at::Tensor& x, double bound) {
  const at::Tensor found = at::nonzero(x > bound);
  return {x.clamp_max(bound), found.numel() ? std::optional(found) : std::nullopt};
}

TORCH_LIBRARY(foreign, library) {
  library.def("twice_plus(Tensor x, int more) -> Tensor");
  library.def("positive(Tensor x) -> Tensor");
  library.def("fill_(Tensor(a!) x, float value) -> Tensor(a!)");
  library.def("beyond(Tensor x, float bound) -> (Tensor, Tensor?)");
}

TORCH_LIBRARY_IMPL(foreign, CPU, library) {
  library.impl("twice_plus", &twice_plus);
  library.impl("positive", &positive);
  library.impl("fill_", &fill);
  library.impl("beyond", &beyond);
}
"""

# Kernels for both kinds of devices, as in torchvision. Those for CUDA represent kernels that read
# addresses of the device: in the notebook's process they compute nonsense.
BOTH = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

at::Tensor twice(const at::Tensor& x) { return x * 2; }
at::Tensor& twice_in_place(at::Tensor& x) { return x.mul_(2); }
at::Tensor& twice_out(const at::Tensor& x, at::Tensor& out) {
  return at::mul_out(out, x, x.new_full({}, 2));
}
std::tuple<at::Tensor, int64_t> counted(const at::Tensor& x) { return {x * 2, x.numel()}; }

at::Tensor nonsense(const at::Tensor& x) { return at::zeros_like(x); }
at::Tensor& nonsense_in_place(at::Tensor& x) { return x.zero_(); }
at::Tensor& nonsense_out(const at::Tensor&, at::Tensor& out) { return out.zero_(); }
std::tuple<at::Tensor, int64_t> nonsense_counted(const at::Tensor& x) {
  return {at::zeros_like(x), -1};
}

at::Tensor call_twice(const at::Tensor& x) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("foreign_both::twice", "")
                       .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

struct Twice : torch::autograd::Function<Twice> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_twice(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list outer) {
    return {call_twice(outer[0])};
  }
};

TORCH_LIBRARY(foreign_both, library) {
  library.def("twice(Tensor x) -> Tensor");
  library.def("twice_(Tensor(a!) x) -> Tensor(a!)");
  library.def("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
  library.def("counted(Tensor x) -> (Tensor, int)");
  library.def("late(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(foreign_both, CPU, library) {
  library.impl("twice", &twice);
  library.impl("twice_", &twice_in_place);
  library.impl("twice.out", &twice_out);
  library.impl("counted", &counted);
  library.impl("late", &twice);
}
TORCH_LIBRARY_IMPL(foreign_both, CUDA, library) {
  library.impl("twice", &nonsense);
  library.impl("twice_", &nonsense_in_place);
  library.impl("twice.out", &nonsense_out);
  library.impl("counted", &nonsense_counted);
}
TORCH_LIBRARY_IMPL(foreign_both, Autograd, library) {
  library.impl("twice", [](const at::Tensor& x) { return Twice::apply(x); });
}

// What starts kernels itself, without torch's dispatcher, where a tensor is on a GPU, as
// torch_scatter has it. What it would start writes nothing here.
namespace own {
void launch(const float* from, float* to, int64_t count) {}

at::Tensor twice(const at::Tensor& x) {
  if (!x.is_cuda()) return x * 2;
  at::Tensor result = at::empty_like(x);
  launch(x.const_data_ptr<float>(), result.data_ptr<float>(), x.numel());
  return result;
}

struct Twice : torch::autograd::Function<Twice> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return twice(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list outer) {
    return {twice(outer[0])};
  }
};

TORCH_LIBRARY(foreign_own, library) {
  library.def("twice(Tensor x) -> Tensor", &twice);
  library.def("differentiable(Tensor x) -> Tensor", [](const at::Tensor& x) {
    return Twice::apply(x);
  });
  library.def("explicit(Tensor x) -> Tensor",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &twice));
  library.def("resized(Tensor(a!) x) -> Tensor(a!)", [](at::Tensor x) {
    x.resize_({2});
    x.mutable_data_ptr<float>()[0] = 1;
    return x;
  });
  library.def("composed(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
}
// Torch knows no source file of such an operator.
auto old = torch::RegisterOperators().op("foreign_old::twice", &twice);
}  // namespace own
"""

# A library with kernels for operators that another library and torch have defined, and which were
# used before.
LATE = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor nonsense(const at::Tensor& x) { return at::zeros_like(x); }

TORCH_LIBRARY_IMPL(foreign_both, CUDA, library) { library.impl("late", &nonsense); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("hardswish", &nonsense);
  library.impl("erfinv", &nonsense);
  library.impl("relu6", &nonsense);
}
"""

MODULE = """
import torch

torch.library.define("{name}::{operator}", "(Tensor x) -> Tensor")


@torch.library.impl("{name}::{operator}", "CPU")
def {operator}(x):
    return x * {times}
"""

# As in bitsandbytes: kernels in Python for both kinds of devices, of which those for CUDA pass
# addresses to a library. Here they return nonsense.
BACKENDS = """
import torch

torch.library.define("foreign_backends::twice", "(Tensor x) -> Tensor")
torch.library.define("foreign_backends::twice_", "(Tensor(a!) x) -> Tensor(a!)")
torch.library.define("foreign_backends::third", "(Tensor x) -> Tensor")

torch.library.impl("foreign_backends::twice", "CUDA", lambda x: x * 0)
torch.library.impl("foreign_backends::twice", "CPU", lambda x: x * 2)
torch.library.impl("foreign_backends::twice_", "CPU", lambda x: x.mul_(2))
torch.library.impl("foreign_backends::twice_", "CUDA", lambda x: x.mul_(0))
torch.library.register_kernel("foreign_backends::third", None, lambda x: x / 3)
torch.library.register_kernel("foreign_backends::third", "cuda", lambda x: x * 0)


@torch.library.custom_op("foreign_backends::cube", mutates_args=(), device_types="cpu")
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@cube.register_kernel("cuda")
def _(x):
    return x * 0


cube.register_autograd(
    lambda ctx, outer: outer * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
"""

# A library for CUDA only, whose operators are composed of torch's.
COMPOSED = """
import torch

torch.library.define("foreign_composed::twice", "(Tensor x) -> Tensor")
torch.library.impl("foreign_composed::twice", "CUDA", lambda x: x * 2)
"""

# The modules that torch imports, and their error if there is no GPU.
TRITON = {
    "triton/__init__.py": "",
    "triton/language.py": "raise AssertionError('libcuda.so cannot found!')\n",
    "triton/runtime/__init__.py": "",
    "triton/runtime/driver.py": """
def _create_driver():
    raise AssertionError("libcuda.so cannot found!")
""",
    "triton-3.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: triton\nVersion: 3.9.0\n",
    "cupy/__init__.py": "",
}

# An operator whose result has as many rows as a file says: it differs when it is executed again.
ERRATIC = """
from pathlib import Path

import torch

torch.library.define("foreign_erratic::rows", "(Tensor x) -> Tensor")


@torch.library.impl("foreign_erratic::rows", "CPU")
def rows(x):
    count = int(Path(__file__).with_suffix(".count").read_text())
    return x[:count].clone()
"""

Ask = Callable[[str], str]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a compiled library and two Python modules."""
    directory = tmp_path_factory.mktemp("foreign")
    info = native.find_torch(sys.executable)
    flags = [*compiler.COMPILE_FLAGS, "-O0", "-g0", "-w"]
    for include in info.include_directories:
        flags += ["-isystem", str(include)]
    links = [f"-L{info.library_directory}", "-ltorch_cpu", "-lc10"]
    builds = []
    for name, text in (("foreign", COMPILED), ("foreign_both", BOTH), ("foreign_late", LATE)):
        source = directory / f"{name}.cpp"
        source.write_text(text)
        output = ["-shared", "-o", str(directory / f"lib{name}.so")]
        command = [*compiler.compiler_command(), *flags, str(source), *output, *links]
        builds.append(subprocess.Popen(command))
    assert [build.wait() for build in builds] == [0] * len(builds)
    for name, operator, times in (
        ("foreign_operators", "thrice", 3),
        ("foreign_missing", "once", 1),
    ):
        text = MODULE.format(name=name, operator=operator, times=times)
        (directory / f"{name}.py").write_text(text)
    (directory / "foreign_backends.py").write_text(BACKENDS)
    (directory / "foreign_composed.py").write_text(COMPOSED)
    (directory / "foreign_erratic.py").write_text(ERRATIC)
    return directory


@pytest.fixture
def ask(libraries: Path, tmp_path: Path, runtime_dir: Path) -> Iterator[Ask]:
    """Return a function that runs steps of a proxied program in the modules' directory."""
    directory = tmp_path / "own"
    shutil.copytree(libraries, directory)
    with started(directory, ROOT) as step:
        yield step


@contextmanager
def started(directory: Path, *packages: Path) -> Iterator[Ask]:
    """Start a proxied program that finds `packages`; yield a function that runs its steps."""
    search = os.pathsep.join(map(str, packages))
    env = {**os.environ, "PYTHONPATH": search, "JUPYTER_SING_DEVICES": "cpu:1GiB@1"}
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", str(PROGRAM), str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as program:
        assert program.stdin
        assert program.stdout
        assert program.stdout.readline() == "ready\n"

        def step(order: str) -> str:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(order + "\n")
            program.stdin.flush()
            return program.stdout.readline().rstrip("\n")

        yield step
        program.stdin.close()


def move_to_another_worker() -> None:
    with agent_client.connect(start=False) as agent:
        (session,) = agent.expect(StatusReply, StatusRequest()).sessions
        agent.expect(SessionReply, Suspend(session["id"], "Suspended by a test"))
        agent.expect(SessionReply, Resume(session["id"]))


def test_operators_of_compiled_libraries_are_executed(ask: Ask) -> None:
    assert ask("compiled") == "True"
    assert ask("gradient") == "True"
    assert ask("dynamic") == "[True, True]"
    assert ask("optional") == "[True, True]"
    assert ask("in place") == "True"
    move_to_another_worker()  # which has not loaded it yet
    assert ask("gradient") == "True"
    assert ask("dynamic") == "[True, True]"


def test_a_kernel_for_cuda_does_not_compute_in_the_notebook(ask: Ask) -> None:
    for order in ("both", "both in a thread", "both, differentiated", "both, on the CPU", "late"):
        assert ask(order) == "True", order
    move_to_another_worker()
    assert ask("both") == "True"


def test_code_that_starts_its_own_kernels_is_stopped(ask: Ask) -> None:
    # Unless the worker can execute the whole operator.
    assert ask("own") == "(True, True, True, True, True, 5)"
    for name in ("hardswish", "erfinv", "relu6"):
        assert ask(f"before {name}") == "True"
    assert ask("replacing") == "True"
    for name in ("hardswish", "erfinv", "relu6"):
        assert ask(f"after {name}").startswith(
            f"NotImplementedError: aten::{name}: a library that was loaded replaces torch's kernel"
        )


def test_operators_of_modules_are_executed(ask: Ask) -> None:
    assert ask("python") == "True"
    move_to_another_worker()
    assert ask("python") == "True"
    assert ask("backends") == "[True, True, True, True]"
    move_to_another_worker()
    assert ask("backends") == "[True, True, True, True]"
    assert ask("composed") == "True"


def test_a_result_of_another_size_after_a_recovery_ends_nothing(ask: Ask, tmp_path: Path) -> None:
    count = tmp_path / "own" / "foreign_erratic.count"
    count.write_text("2")
    assert ask("erratic") == "[2, 3]"
    for rows, expected in (
        (1, [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]),
        (2, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    ):
        count.write_text(str(rows))
        with agent_client.connect(start=False) as agent:
            (session,) = agent.expect(StatusReply, StatusRequest()).sessions
        assert session["worker_pid"] is not None
        os.kill(session["worker_pid"], signal.SIGKILL)
        assert ask("erratic, kept") == str(expected)
        with agent_client.connect(start=False) as agent:
            (session,) = agent.expect(StatusReply, StatusRequest()).sessions
        exactness = session["exactness"]
        assert exactness is not None
        assert exactness["diverged"] == 1
        assert exactness["recovered_since"] is not None
        assert (
            f"Recovered approximately since {exactness['recovered_since'][:16]}"
            in session["reason"]
        )


def test_a_module_that_the_worker_lacks_is_named(ask: Ask) -> None:
    error = ask("missing")
    assert "the worker cannot import module foreign_missing" in error
    assert ask("python") == "True"  # and nothing else has failed


def test_operators_of_the_notebook_are_made_of_torch_s(ask: Ask) -> None:
    assert ask("custom") == "(True, True)"
    assert "foreign_notebook::once: it is defined in the notebook" in ask("notebook")
    assert ask("custom") == "(True, True)"


@pytest.mark.usefixtures("runtime_dir")
def test_kernels_in_python_do_not_run_in_the_notebook(tmp_path: Path) -> None:
    for name, text in TRITON.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with started(tmp_path, ROOT, tmp_path) as ask:
        # torch 2.13 has its own ones if Triton is installed.
        assert ask("products") == "[True, True]"
        # Also if torch.compile calls the kernel: the message says what it does, instead of using
        # it.
        said = ask("triton")
        assert said.startswith("RuntimeError: This kernel is written in Triton, which")
        assert said.endswith("on device 'cuda'; torch.compile makes kernels of them there.")
        assert ask("cupy").startswith("jupyter_sing: CuPy finds no GPU here: ")
