"""Files of GPUs, which kernels, programs and their children do not open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.files import tracker
from kernelproxy.native import tools

#: Opens a file by each function that libraries may call, and shows the errors.
OPENING = """
import ctypes, errno, os, sys
path = sys.argv[1].encode()
libc = ctypes.CDLL(None, use_errno=True)
for name in ("open", "open64", "__open_2", "__open64_2"):
    fd = getattr(libc, name)(path, os.O_RDWR)
    print(name, "opened" if fd >= 0 else errno.errorcode[ctypes.get_errno()])
for name in ("openat", "openat64", "__openat_2", "__openat64_2"):
    fd = getattr(libc, name)(-100, path, os.O_RDWR)
    print(name, "opened" if fd >= 0 else errno.errorcode[ctypes.get_errno()])
"""


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    """Return the path of a file that stands for that of a GPU."""
    file = tmp_path / "dev" / "nvidia0"
    file.parent.mkdir()
    file.touch()
    return file


@pytest.fixture
def environment(gpu: Path) -> dict[str, str]:
    env = dict(os.environ)
    tracker.preload(env, tools.file_tracker())
    env[gpu_access.FILES_VARIABLE] = f"/nowhere/gpu:{gpu.parent}/nvidia:{gpu.parent}/dxg"
    return env


def run(command: list[str], env: Mapping[str, str]) -> tuple[str, str]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def opening(path: Path, env: Mapping[str, str]) -> set[str]:
    """Return the results of opening a file."""
    out, _ = run([sys.executable, "-I", "-S", "-c", OPENING, str(path)], env)
    lines = out.splitlines()
    assert len(lines) == 8
    return {line.split()[1] for line in lines}


def test_files_of_gpus_are_not_opened(gpu: Path, environment: dict[str, str]) -> None:
    assert opening(gpu, environment) == {"EACCES"}
    assert opening(gpu.parent / "nvidia1", environment) == {"ENOENT"}  # there is no such GPU
    other = gpu.parent / "null"
    other.touch()
    assert opening(other, environment) == {"opened"}
    del environment[gpu_access.FILES_VARIABLE]
    assert opening(gpu, environment) == {"opened"}


def test_a_child_that_finds_no_gpu_says_so_once(gpu: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-I", "-S", "-c", OPENING, str(gpu)]
    assert run(command, environment)[1] == ""  # the notebook's process itself
    (line,) = run(command, {**environment, "SING_CLIENT": "1"})[1].splitlines()
    assert line.startswith("jupyter_sing: this program finds no GPU, because ")
    assert "`jupyter sing run`" in line
    assert "JUPYTER_SING_DIRECT_GPU=1" in line


def test_nvidia_smi_may_look(gpu: Path, environment: dict[str, str], tmp_path: Path) -> None:
    show = shutil.which("cat")
    assert show
    gpu.write_text("GPU 0")
    for name, allowed in (("nvidia-smi", True), ("other-smi", False)):
        program = Path(shutil.copy(show, tmp_path / name))
        done = subprocess.run(
            [program, gpu], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.returncode) == (("GPU 0", 0) if allowed else ("", 1))
