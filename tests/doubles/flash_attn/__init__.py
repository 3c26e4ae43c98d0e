"""Build of the double of flash-attn."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from kernelproxy.native import build as native
from kernelproxy.native import compiler

SOURCE = Path(__file__).resolve().parent / "source"


def build(directory: Path) -> Path:
    """Build the double in a directory, in which Python then finds it; return the directory."""
    shutil.copytree(SOURCE, directory)
    info = native.find_torch(sys.executable)
    includes = [*info.include_directories, sysconfig.get_path("include")]
    command = [*compiler.compiler_command(), *compiler.COMPILE_FLAGS, "-O0", "-g0", "-w"]
    command += [part for each in includes for part in ("-isystem", str(each))]
    command += ["-shared", str(directory / "flash_attn_2_cuda.cpp")]
    command += ["-o", str(directory / "flash_attn_2_cuda.so")]
    command += [f"-L{info.library_directory}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    return directory
