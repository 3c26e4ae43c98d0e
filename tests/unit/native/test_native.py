"""The native part: the version of torch, the libraries, and building them once."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproxy.common.errors import NativeError
from kernelproxy.native import build, compiler, libraries
from tests.doubles.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]

UNITS = {
    "oplog/shared.h": "#pragma once\nint sing_shared();\n",
    "oplog/shared.cpp": '#include "oplog/shared.h"\nint sing_shared() { return 40; }\n',
    "client/client.cpp": (
        '#include <Python.h>\n#include "oplog/shared.h"\n'
        'extern "C" int sing_test() { return sing_shared() + 2; }\n'
    ),
    "worker/worker.cpp": (
        '#include "oplog/shared.h"\nextern "C" int sing_test() { return sing_shared() + 3; }\n'
    ),
}


def write_units(tree: Path) -> None:
    for name, text in UNITS.items():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources, as if this package had been installed with them."""
    package = tmp_path / "site" / "kernelproxy"
    write_units(package / "_native")
    monkeypatch.setattr(libraries, "PACKAGE", package)
    monkeypatch.delenv("JUPYTER_SING_ANY_TORCH", raising=False)
    return package / "_native"


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    """A directory that looks like torch, with empty libraries of the right names."""
    directory = tmp_path / "env" / "torch"
    (directory / "lib").mkdir(parents=True)
    (directory / "__init__.py").write_text("raise ImportError('must not be imported')")
    (directory / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    for library in build.LINKED["client"]:
        target = directory / "lib" / f"lib{library}.so"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", str(target)], check=True)
    return directory


@pytest.fixture
def info(fake_torch: Path) -> build.TorchInfo:
    return build.describe(fake_torch)


def test_torch_is_described_without_importing_it(fake_torch: Path) -> None:
    info = build.describe(fake_torch)
    assert info.version == "2.13.0+cpu"
    assert info.directory == fake_torch
    assert info.python_tag == sys.implementation.cache_tag


def test_torch_of_another_interpreter_is_found(fake_torch: Path) -> None:
    env = {"PYTHONPATH": str(fake_torch.parent), "PATH": "/usr/bin:/bin"}
    info = build.find_torch(sys.executable, env)
    assert info == build.describe(fake_torch)


def test_environment_without_torch_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(NativeError, match=r"bin/python has no torch$"):
        build.find_torch(python)


def test_interpreter_that_is_missing_or_broken_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="could not be asked"):
        build.find_torch(str(tmp_path / "python"))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'bad interpreter' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(NativeError, match=r"failed: bad interpreter$"):
        build.find_torch(str(broken))


def test_libraries_are_built_once_and_work(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    said: list[libraries.Compiling] = []
    first = build.ensure(info, said.append, cache=tmp_path / "cache")
    assert ctypes.PyDLL(str(first.client)).sing_test() == 42
    assert ctypes.PyDLL(str(first.worker)).sing_test() == 43
    assert list(map(str, said)) == [
        f"Compiling GPU support for torch 2.13 (first use only), {done} of 3" for done in range(4)
    ]
    assert build.ensure(info, said.append, cache=tmp_path / "cache") == first
    assert len(said) == 4


def test_changed_source_or_torch_is_another_pair(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    first = build.ensure(info, cache=tmp_path / "cache")
    other = build.ensure(replace(info, version="2.12.1"), cache=tmp_path / "cache")
    (tree / "oplog" / "shared.h").write_text("#pragma once\nint sing_shared();  // changed\n")
    changed = build.ensure(info, cache=tmp_path / "cache")
    assert len({first.client, other.client, changed.client}) == 3


COMPILER = """#!/bin/sh
# Counts the units that are compiled, and waits until somebody lets it go on.
case " $* " in *" -c "*) echo "unit $PPID" >>"$COMPILED"; read -r line <"$GATE";; esac
exec g++ "$@"
"""

USER = """
import sys
from pathlib import Path
from kernelproxy.native import libraries, build as native
libraries.PACKAGE = Path(sys.argv[1])
parts = native.ensure(
    native.describe(Path(sys.argv[2])), lambda told: print(told, flush=True),
    cache=Path(sys.argv[3]),
)
print(parts.client, flush=True)
"""


class Users:
    """Processes that need the same libraries at once; compilers wait until the gate opens."""

    def __init__(self, tree: Path, fake_torch: Path, tmp_path: Path) -> None:
        compiler, gate = tmp_path / "compiler", tmp_path / "gate"
        self.compiled = tmp_path / "compiled"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        os.mkfifo(gate)
        self._gate = os.open(gate, os.O_RDWR)
        variables = {"CXX": compiler, "COMPILED": self.compiled, "GATE": gate}
        env = {**os.environ, **{name: str(path) for name, path in variables.items()}}
        given = map(str, (tree.parent, fake_torch, tmp_path / "c"))
        command = [sys.executable, "-c", USER, *given]
        self.all = [
            subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]

    def go_on(self, times: int = 1) -> None:
        os.write(self._gate, times * b"go on\n")

    def close(self) -> None:
        os.close(self._gate)
        for user in self.all:
            user.kill()
            user.communicate()


@pytest.fixture
def users(tree: Path, fake_torch: Path, tmp_path: Path) -> Iterator[Users]:
    found = Users(tree, fake_torch, tmp_path)
    yield found
    found.close()


def told(user: subprocess.Popen[str]) -> str:
    """Return a user's next line of output; skip those without the number of units to compile."""
    assert user.stdout is not None
    said = user.stdout.readline()
    while said.endswith("(first use only)\n"):
        said = user.stdout.readline()
    return said


@pytest.mark.slow
def test_simultaneous_processes_compile_once_and_show_progress(users: Users) -> None:
    for done in range(3):
        text = f"Compiling GPU support for torch 2.13 (first use only), {done} of 3\n"
        assert [told(user) for user in users.all] == [text] * 3
        users.go_on()
    (client,) = {user.communicate(timeout=60)[0].splitlines()[-1] for user in users.all}
    assert client.endswith("libsing_client.so")
    assert [user.returncode for user in users.all] == [0, 0, 0]
    assert users.compiled.read_text().count("unit") == 3


@pytest.mark.slow
def test_a_killed_compiling_process_is_replaced(users: Users) -> None:
    for user in users.all:
        told(user)
    wait_until(users.compiled.exists)
    wait_until(lambda: users.compiled.read_text().endswith("\n"))
    compiling = int(users.compiled.read_text().split()[1])
    (victim,) = (user for user in users.all if user.pid == compiling)
    victim.kill()
    victim.wait()
    users.go_on(12)  # with the processes that it has started
    others = [user for user in users.all if user is not victim]
    (client,) = {user.communicate(timeout=60)[0].splitlines()[-1] for user in others}
    assert client.endswith("libsing_client.so")
    later = [line.split()[1] for line in users.compiled.read_text().splitlines()]
    assert len({*later} - {str(compiling)}) == 1


def test_libraries_in_the_package_are_used_first(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    built = build.ensure(info, cache=tmp_path / "cache")
    shipped = tree.parent / "_native_lib"
    shipped.mkdir()
    built.client.parent.rename(shipped / built.client.parent.name)
    found = build.ensure(info, cache=tmp_path / "empty")
    assert found.client.parent.parent == shipped
    assert not (tmp_path / "empty").exists()


def test_failing_compiler_is_one_line_and_leaves_nothing(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    (tree / "worker" / "worker.cpp").write_text("int broken( {\n")
    with pytest.raises(NativeError, match=r"worker\.cpp:1:.*error") as caught:
        build.ensure(info, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert "\n" in caught.value.__notes__[0]
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_missing_compiler_is_named(
    tree: Path, info: build.TorchInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        build.ensure(info, cache=tmp_path / "cache")


def test_cache_that_cannot_be_written_is_named(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(NativeError, match="cannot be built in"):
        build.ensure(info, cache=tmp_path / "cache")


def test_rest_of_a_killed_build_is_removed(
    tree: Path, info: build.TorchInfo, tmp_path: Path
) -> None:
    parts = build.ensure(info, cache=tmp_path / "cache")
    key = parts.client.parent.name
    parts.worker.unlink()
    (tmp_path / "cache" / f".{key}.killed").mkdir()
    assert build.ensure(info, cache=tmp_path / "cache") == parts
    assert parts.worker.exists()
    assert not list((tmp_path / "cache").glob(f".{key}.*"))


@pytest.mark.parametrize("version", ["2.10.3", "2.14.0", "3.0.0", "1.13.1", "unknown"])
def test_unsupported_torch_is_refused_in_one_sentence(
    tree: Path,
    info: build.TorchInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    other = replace(info, version=version)
    with pytest.raises(NativeError, match=rf"^torch {version} is not supported: 2.11 to"):
        build.ensure(other, cache=tmp_path / "cache")
    monkeypatch.setenv("JUPYTER_SING_ANY_TORCH", "1")
    assert build.ensure(other, cache=tmp_path / "cache").client.exists()


def test_checkout_compiles_only_what_changed(
    info: build.TorchInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path / "clone" / "kernelproxy")
    write_units(tmp_path / "clone" / "native")
    build.ensure(info, cache=tmp_path / "cache")
    objects = tmp_path / "cache" / "objects"
    before = {file.name for file in objects.iterdir()}
    assert len(before) == 3
    changed = tmp_path / "clone" / "native" / "worker" / "worker.cpp"
    changed.write_text(changed.read_text() + "// changed\n")
    build.ensure(info, cache=tmp_path / "cache")
    assert {file.name.split("-")[0] for file in objects.iterdir() if file.name not in before} == {
        "worker"
    }


def test_units_share_a_header_that_is_compiled_once_and_not_kept(
    info: build.TorchInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path / "clone" / "kernelproxy")
    native = tmp_path / "clone" / "native"
    write_units(native)
    (native / build.PRECOMPILED).write_text("#include <vector>\n#define PRECOMPILED 1\n")
    for number in range(compiler.PRECOMPILED_UNITS):
        unit = native / "worker" / f"unit{number}.cpp"
        unit.write_text(f"#ifndef PRECOMPILED\n#error\n#endif\nstd::vector<int> unit{number};\n")
    parts = build.ensure(info, cache=tmp_path / "cache")
    assert ctypes.PyDLL(str(parts.worker)).sing_test() == 43
    objects = tmp_path / "cache" / "objects"
    assert {file.suffix for file in objects.iterdir()} == {".o"}


def test_checkout_keeps_the_last_pairs_only(
    info: build.TorchInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path / "clone" / "kernelproxy")
    monkeypatch.setattr(libraries, "PAIRS_KEPT", 2)
    write_units(tmp_path / "clone" / "native")
    for patch in range(4):
        last = build.ensure(replace(info, version=f"2.13.{patch}"), cache=tmp_path / "cache")
    pairs = [file for file in (tmp_path / "cache").glob("torch*") if file.is_dir()]
    assert len(pairs) == 2
    assert last.client.parent in pairs


def test_checkout_refuses_warnings_that_users_never_see(
    tree: Path, info: build.TorchInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = "namespace { int unused() { return 1; } }\n"
    (tree / "worker" / "worker.cpp").write_text(UNITS["worker/worker.cpp"] + unused)
    build.ensure(info, cache=tmp_path / "cache")
    monkeypatch.setattr(libraries, "PACKAGE", tmp_path / "clone" / "kernelproxy")
    (tmp_path / "clone").mkdir()
    tree.rename(tmp_path / "clone" / "native")
    with pytest.raises(NativeError, match="unused"):
        build.ensure(info, cache=tmp_path / "strict")


def with_named_torches(clone: Path, command: list[str], fake_torch: Path, tmp_path: Path) -> None:
    """A wheel contains the libraries of all torches that are named, or is not built at all."""
    other = shutil.copytree(fake_torch, tmp_path / "other" / "torch")
    (other / "version.py").write_text("__version__ = '2.11.0+cu128'\n")
    for missing, names in ((False, ["2.11.0+cu128", "2.13.0+cpu"]), (True, [])):
        directories = [other, tmp_path / "none"] if missing else [other, fake_torch]
        named = {"JUPYTER_SING_TORCH_DIRS": os.pathsep.join(map(str, directories))}
        done = subprocess.run(
            [*command[:-1], str(tmp_path / "wheels")],
            cwd=clone, env={**os.environ, **named}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == missing, done.stderr
        if missing:
            assert "torch could not be read" in done.stderr
            continue
        (wheel,) = (tmp_path / "wheels").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            pairs = {name.split("/")[-2] for name in archive.namelist() if "libsing_c" in name}
        assert sorted(pair.split("-")[0] for pair in pairs) == [f"torch{name}" for name in names]


def test_a_build_that_fails_is_one_line_and_status_1() -> None:
    command = [sys.executable, "-m", "kernelproxy.native", "--python", "/nowhere/python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("python -m kernelproxy.native: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_installed_wheel_builds_for_an_environment_without_our_package(
    fake_torch: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        clone.mkdir(exist_ok=True)
        (clone / name).write_text((ROOT / name).read_text())
    for module in (
        "__init__", "headless", "common/__init__", "common/errors", "common/options",
        "common/ownership", "common/paths", "common/units", "native/__init__", "native/__main__",
        "native/build", "native/compiler", "native/libraries", "native/machine_libraries",
        "native/tools",
    ):  # fmt: skip
        name = f"kernelproxy/{module}.py"
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text((ROOT / name).read_text())
    (clone / "jupyter-config").mkdir()
    (clone / "jupyter-config" / "jupyter_sing.json").write_text("{}")
    (clone / "jupyter-config" / "jupyter_sing.pth").touch()
    (clone / "jupyter_sing").mkdir()
    (clone / "jupyter_sing" / "__init__.py").touch()
    write_units(clone / "native")
    for part in ("fstrack", "sandbox"):
        shutil.copytree(ROOT / "native" / part, clone / "native" / part)
    # An installed package is imported when Python starts, unlike the one of the wheel.
    start = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import kernelproxy.headless;"
        "import runpy; del sys.path[0]; runpy.run_module('hatchling', run_name='__main__')"
    )
    command = [sys.executable, "-c", start, "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    package = site / "kernelproxy"
    assert (package / "_native" / "client" / "client.cpp").is_file()
    # Libraries for the torch of the build environment are in the wheel, if there is one.
    here = importlib.util.find_spec("torch") is not None
    assert [
        build.NativeParts.inside(pair) is not None for pair in package.glob("_native_lib/torch*")
    ] == ([True] if here else [])
    assert len([*package.glob("_native_lib/fstrack*/libsing_fstrack.so")]) == 1
    with_named_torches(clone, command, fake_torch, tmp_path)
    assert (package / "_native" / "fstrack" / "journal.h").is_file()
    with zipfile.ZipFile(wheel) as archive:
        (sandbox,) = (each for each in archive.infolist() if each.filename.endswith("sing-sandbox"))
    assert sandbox.external_attr >> 16 & 0o111  # as installers keep it
    assert (package / "_native" / "sandbox" / "options.h").is_file()

    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    purelib = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
    ).strip()
    (fake_torch / "version.py").write_text("__version__ = '2.12.0+other'\n")
    fake_torch.rename(Path(purelib) / "torch")
    run = [sys.executable, "-m", "kernelproxy.native", "--python", str(python)]
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "x")}
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    client, worker = map(Path, done.stdout.split())
    assert client.parent.parent == tmp_path / "x" / "jupyter_sing" / "native"
    assert ctypes.PyDLL(str(worker)).sing_test() == 43
    assert done.stderr.splitlines() == ["Compiling GPU support for torch 2.12 (first use only)."]


def test_native_module_needs_only_the_standard_library() -> None:
    code = (
        "import sys, json; before = set(sys.modules); import kernelproxy.native;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    )
    done = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert json.loads(done) == ["kernelproxy"]
