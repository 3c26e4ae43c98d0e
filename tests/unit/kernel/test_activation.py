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
        "path = list(sys.meta_path)\n"
        "activate()\n"
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


def test_a_torch_that_is_there_already_is_left_alone(fake_torch: Path, runtime_dir: Path) -> None:
    code = "import torch, sys\npath = list(sys.meta_path)\nprint(activate(), sys.meta_path == path)"
    done = run(code, fake_torch, runtime_dir, SING_SESSION="s")
    assert done.stdout == "False True\n"
    assert "torch was imported before" in done.stderr


def test_a_child_does_not_become_a_second_client(fake_torch: Path, runtime_dir: Path) -> None:
    child = "from kernelproxy.kernel.activation import activate; print(activate())"
    done = run(
        "import os, subprocess, sys\n"
        "print(activate(), flush=True)\n"
        "print(os.environ['SING_SESSION'], 'kernelproxy' in os.environ['PYTHONPATH'], flush=True)\n"
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
