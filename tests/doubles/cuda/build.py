"""Build of the double of NVIDIA's libraries: ``python -m tests.doubles.cuda.build DIRECTORY``.

It is compiled with the headers of the CUDA build of torch in the interpreter's environment, and
stands for the version of the runtime that is there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernelproxy.native import compiler

HERE = Path(__file__).resolve().parent
_DEFINED = re.compile(r" T (\w+)", re.MULTILINE)
_UNDEFINED = re.compile(r" U (cu[A-Z]\w+)", re.MULTILINE)


def build(target: Path) -> Path:
    """Build the libraries in a directory, unless they are there; return that of the runtime.

    Everything is in the library of the runtime. The others refer to it, so that programs find them
    by name.
    """
    site = _site_packages()
    real = next(iter(site.glob("nvidia/cu*/lib/libcudart.so.*")))
    runtime = target / real.name
    sources = [*HERE.glob("*/*.cpp"), *HERE.glob("*/*.h"), Path(__file__)]
    newest = max(source.stat().st_mtime for source in sources)
    if runtime.exists() and runtime.stat().st_mtime >= newest:
        return runtime
    target.mkdir(parents=True, exist_ok=True)
    command = [*compiler.compiler_command(), "-O1", "-g", "-fPIC", "-pthread"]
    headers = [HERE, real.parents[1] / "include"]
    in_cpp = [*command, "-std=c++20", "-Wall", "-Wextra", *(f"-I{each}" for each in headers)]

    def compiled(source: Path) -> Path:
        made = target / f"{source.stem}.o"
        subprocess.run([*in_cpp, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        own = [each for each in sorted(HERE.glob("*/*.cpp")) if each.parent.name != "operators"]
        objects = list(pool.map(compiled, own))
    wanted = set(_DEFINED.findall(_symbols(real, "--defined-only")))
    driver_user = next(iter(site.glob("torch/lib/libcaffe2_nvrtc.so")))
    wanted |= set(_UNDEFINED.findall(_symbols(driver_user, "--undefined-only")))
    ours = set(_DEFINED.findall("".join(_symbols(each) for each in objects)))
    objects.append(_lacking(target, sorted(wanted - ours), command))
    versions = target / "versions"
    versions.write_text(f"{real.name} {{ global: cu*; nvml*; __cuda*; local: *; }};\n")
    made = target / f"{runtime.name}.new"
    link = ["-shared", f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script,{versions}"]
    link += ["-static-libstdc++", "-static-libgcc"]
    subprocess.run([*command, *link, *map(str, objects), "-o", str(made)], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        link = ["-shared", f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        subprocess.run([*command, *link, str(made), "-o", str(target / name)], check=True)
    made.rename(runtime)
    return runtime


def build_operators(target: Path) -> Path:
    """Build the library of torch's operators in a directory, unless it is there; return it."""
    site = _site_packages()
    torch = site / "torch"
    library = target / "operators.so"
    sources = sorted((HERE / "operators").glob("*.cpp"))
    newest = max(each.stat().st_mtime for each in (HERE / "operators").iterdir())
    if library.exists() and library.stat().st_mtime >= newest:
        return library
    target.mkdir(parents=True, exist_ok=True)
    headers = [*site.glob("nvidia/cu*/include"), torch / "include"]
    headers += [torch / "include/torch/csrc/api/include"]
    command = [*compiler.compiler_command(), "-O1", "-g", "-fPIC", "-std=c++20", "-Wall"]
    command += ["-Wextra", "-Wno-stringop-overflow", f"-I{HERE}"]  # of torch's headers
    command += [f"-isystem{each}" for each in headers]

    def compiled(source: Path) -> Path:
        made = target / f"operators_{source.stem}.o"
        subprocess.run([*command, "-c", str(source), "-o", str(made)], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    link = [f"-L{torch}/lib", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    made = target / f"{library.name}.new"
    subprocess.run([*command, "-shared", *map(str, objects), *link, "-o", str(made)], check=True)
    made.rename(library)
    return library


def _lacking(target: Path, names: list[str], command: list[str]) -> Path:
    """Compile functions that the double lacks: each reports its name and is not supported."""
    source, made = target / "lacking.c", target / "lacking.o"
    lines = ["int cuda_double_lacks(const char* name);"]
    lines += [f'int {name}(void) {{ return cuda_double_lacks("{name}"); }}' for name in names]
    source.write_text("\n".join(lines) + "\n")
    subprocess.run([*command, "-x", "c", "-c", str(source), "-o", str(made)], check=True)
    return made


def _symbols(library: Path, *options: str) -> str:
    dynamic = ["-D"] if options else []
    command = ["nm", *dynamic, *options, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _site_packages() -> Path:
    """Return the directory of the installed packages, among them torch and NVIDIA's."""
    return next(iter(Path(sys.prefix).glob("lib/python*/site-packages")))


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
