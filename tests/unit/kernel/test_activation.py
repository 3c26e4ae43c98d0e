"""Activation: no effect without a session, and none on torch's import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

Run = subprocess.CompletedProcess[str]


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    """Return a directory with a package that looks like torch."""
    torch = tmp_path / "packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.13.0'\n")
    (torch / "_C.py").write_text("names = 'as they were'\n")
    (torch / "__init__.py").write_text(
        "from torch import _C\nfrom torch.version import __version__\n"
    )
    return torch.parent


def run(code: str, packages: Path, runtime_dir: Path, **env: str) -> Run:
    """Run code in a process of its own, with the environment of a kernel's process."""
    keep = {"PATH": os.environ["PATH"], "JUPYTER_SING_RUNTIME_DIR": str(runtime_dir)}
    search = {"PYTHONPATH": f"{ROOT}{os.pathsep}{packages}", "SING_BUNDLE": str(ROOT)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from kernelproxy.kernel.activation import activate, current\n" + code,
        ],
        env={**keep, **search, "XDG_CACHE_HOME": str(runtime_dir), "CXX": "no-compiler", **env},
        capture_output=True,
        text=True,
        check=False,
        cwd=runtime_dir,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_a_session_nothing_is_changed(fake_torch: Path, runtime_dir: Path) -> None:
    done = run(
        "import os, sys\n"
        "before = list(sys.meta_path), dict(os.environ)\n"
        "print(activate(), before == (sys.meta_path, dict(os.environ)))\n"
        "import torch; print(torch._C.names, current().session == '')",
        fake_torch,
        runtime_dir,
    )
    assert (done.stdout, done.stderr) == ("False True\nas they were True\n", "")


def test_a_failure_before_the_import_leaves_torch_alone(
    fake_torch: Path, runtime_dir: Path
) -> None:
    done = run(
        "import sys, importlib\n"
        "activate()\n"
        "path = [each for each in sys.meta_path if type(each).__name__ != 'TorchFinder']\n"
        "import torch; print(torch._C.names, torch.__version__)\n"
        "import torch, torch.version\n"
        "print(type(torch.__spec__.loader).__name__, torch.__loader__ is torch.__spec__.loader)\n"
        "print(sys.meta_path == path, 'exec_module' in vars(torch.__spec__.loader))\n"
        "importlib.reload(torch)",
        fake_torch,
        runtime_dir,
        SING_SESSION="s",
    )
    assert done.stdout == "as they were 2.13.0\nSourceFileLoader True\nTrue False\n"
    assert done.stderr.startswith("jupyter_sing: CPU only: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"SING_SESSION": "s", "CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides"),
        ({"SING_SESSION": "s", "CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES hides"),
        ({"SING_REASON": "torch 9 is too new"}, "torch 9 is too new"),
    ],
)
def test_the_reason_is_reported_when_torch_is_imported(
    fake_torch: Path, runtime_dir: Path, env: dict[str, str], reason: str
) -> None:
    code = "import sys\nactivate()\nprint('quiet', file=sys.stderr)\nimport torch"
    done = run(code, fake_torch, runtime_dir, **env)
    quiet, line = done.stderr.splitlines()
    assert quiet == "quiet"
    assert line.startswith(f"jupyter_sing: CPU only: {reason}")


VISIBLE = "print(os.environ.get('CUDA_VISIBLE_DEVICES'), end=' ', flush=True)\n"
CHILD = "os.system('echo $CUDA_VISIBLE_DEVICES')\n"


def test_cuda_finds_no_device_in_a_process_with_a_session(
    fake_torch: Path, runtime_dir: Path
) -> None:
    code = "import os, sys\nactivate()\n" + VISIBLE + CHILD
    assert run(code, fake_torch, runtime_dir, SING_SESSION="s").stdout == "None -1\n"
    numbered = {"SING_SESSION": "s", "CUDA_VISIBLE_DEVICES": "2"}
    assert run(code, fake_torch, runtime_dir, **numbered).stdout == "2 -1\n"
    # What is no part of the session, such as the daemon, undoes it.
    restore = "from kernelproxy.kernel import gpu_access; gpu_access.restore(os.environ)\n"
    child = f"import os, sys; sys.path.append({str(ROOT)!r})\n{VISIBLE}{restore}{VISIBLE}"
    code += f"os.execl(sys.executable, 'python', '-c', {child!r})"
    assert run(code, fake_torch, runtime_dir, **numbered).stdout == "2 -1\n-1 2 "
    assert run(code, fake_torch, runtime_dir, SING_SESSION="s").stdout == "None -1\n-1 None "


def test_a_process_without_its_session_has_no_device_either(
    fake_torch: Path, runtime_dir: Path
) -> None:
    # A cell may choose a device before torch is imported.
    code = "import os\nactivate()\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport torch\n"
    for env in ({"SING_SESSION": "s"}, {"SING_REASON": "r"}):
        done = run(code + VISIBLE + CHILD, fake_torch, runtime_dir, **env)
        assert done.stdout == "-1 -1\n"
        assert done.stderr.startswith("jupyter_sing: CPU only: ")
    code = "import os, torch\nactivate()\n" + VISIBLE
    assert run(code, fake_torch, runtime_dir, SING_SESSION="s").stdout == "-1 "


def test_a_process_that_may_use_the_gpu_directly_keeps_it(
    fake_torch: Path, runtime_dir: Path
) -> None:
    code = "import os\nactivate()\nimport torch\n" + VISIBLE + CHILD
    env = {"SING_DIRECT_GPU": "1", "CUDA_VISIBLE_DEVICES": "2"}
    for known in ({"SING_SESSION": "s"}, {"SING_REASON": "r"}):
        done = run(code, fake_torch, runtime_dir, **known, **env)
        assert done.stdout == "2 2\n"
        assert done.stderr.startswith("jupyter_sing: no session: ")


def test_direct_use_of_the_gpu_needs_a_torch_that_guards_addresses(
    fake_torch: Path, runtime_dir: Path
) -> None:
    (fake_torch / "torch" / "version.py").write_text("__version__ = '2.12.0'\n")
    code = "import os\nactivate()\nimport torch\n" + CHILD
    env = {"SING_DIRECT_GPU": "1", "SING_SESSION": "s"}
    done = run(code, fake_torch, runtime_dir, **env)
    assert done.stdout == "-1\n"
    off, why = done.stderr.splitlines()
    assert off.startswith("jupyter_sing: direct use of the GPU is off: with torch 2.12, ")
    assert why.startswith("jupyter_sing: CPU only: ")


def test_a_cell_can_hide_the_device(fake_torch: Path, runtime_dir: Path) -> None:
    code = "import os\nactivate()\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport torch"
    done = run(code, fake_torch, runtime_dir, SING_SESSION="s")
    assert done.stderr == "jupyter_sing: CPU only: CUDA_VISIBLE_DEVICES hides all devices.\n"


LIBRARIES = {
    "cupy/__init__.py": "",
    "numba/__init__.py": "",
    "numba/cuda.py": "",
    "jax.py": "",
    "tensorflow.py": "class sysconfig:\n    get_build_info = lambda: {'is_cuda_build': True}\n",
    "vllm.py": "",
    "pycuda/__init__.py": "",
    "pycuda/driver.py": "",
}


@pytest.fixture
def gpu_libraries(fake_torch: Path) -> Path:
    """Return a directory with modules named like libraries that use GPUs."""
    for name, text in LIBRARIES.items():
        (fake_torch / name).parent.mkdir(exist_ok=True)
        (fake_torch / name).write_text(text)
    return fake_torch


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("cupy", "CuPy"), ("numba.cuda", "numba.cuda"), ("jax", "JAX"),
        ("tensorflow", "TensorFlow"), ("vllm", "vLLM"), ("pycuda.driver", "PyCUDA"),
    ],
)  # fmt: skip
def test_a_library_that_finds_no_gpu_is_named_at_its_import(
    gpu_libraries: Path, runtime_dir: Path, module: str, shown: str
) -> None:
    (gpu_libraries / "jax_cuda13_plugin.py").touch()
    code = f"activate()\nimport {module}\nimport {module}"
    (line,) = run(code, gpu_libraries, runtime_dir, SING_SESSION="s").stderr.splitlines()
    assert line.startswith(f"jupyter_sing: {shown} finds no GPU here: ")
    assert "set JUPYTER_SING_DIRECT_GPU=1 before the kernel starts" in line
    assert run(code, gpu_libraries, runtime_dir, SING_SESSION="s", SING_DIRECT_GPU="1").stderr == ""


def test_a_library_that_would_use_the_cpu_is_not_named(
    gpu_libraries: Path, runtime_dir: Path
) -> None:
    (gpu_libraries / "tensorflow.py").write_text(
        LIBRARIES["tensorflow.py"].replace("True", "False")
    )
    code = "activate()\nimport jax, tensorflow, numba.cuda"
    env = {"SING_SESSION": "s", "NUMBA_ENABLE_CUDASIM": "1"}
    assert run(code, gpu_libraries, runtime_dir, **env).stderr == ""


def test_a_torch_that_is_there_already_is_left_alone(fake_torch: Path, runtime_dir: Path) -> None:
    code = "import torch, sys\nprint(activate(), [type(each).__name__ for each in sys.meta_path])"
    done = run(code, fake_torch, runtime_dir, SING_SESSION="s")
    assert done.stdout.startswith("False ")
    assert "TorchFinder" not in done.stdout
    assert "torch was imported before" in done.stderr


def test_a_child_does_not_become_a_second_client(fake_torch: Path, runtime_dir: Path) -> None:
    child = "from kernelproxy.kernel.activation import activate; print(activate())"
    done = run(
        "import os, subprocess, sys\n"
        "print(activate(), flush=True)\n"
        "search = os.environ['PYTHONPATH'].split(os.pathsep)\n"
        f"print(os.environ['SING_SESSION'], {str(ROOT)!r} in search, flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True, cwd={str(ROOT)!r})",
        fake_torch,
        runtime_dir,
        SING_SESSION="s",
    )
    assert done.stdout == "True\ns False\nFalse\n"


def test_a_failing_torch_fails_as_without_us(fake_torch: Path, runtime_dir: Path) -> None:
    (fake_torch / "torch" / "_C.py").write_text("raise ImportError('libcudart is missing')\n")
    done = run(
        "activate()\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import torch\n"
        "    except ImportError as error:\n"
        "        print(error)",
        fake_torch,
        runtime_dir,
        SING_SESSION="s",
    )
    assert done.stdout == "libcudart is missing\n" * 2


def test_asking_for_torch_is_not_importing_it(fake_torch: Path, runtime_dir: Path) -> None:
    code = "import importlib.util\nactivate()\nprint(importlib.util.find_spec('torch') is not None)"
    done = run(code, fake_torch, runtime_dir, SING_SESSION="s")
    assert (done.stdout, done.stderr) == ("True\n", "")
