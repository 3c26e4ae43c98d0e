"""The form in which processes can be saved: how it is found, by which user, and error messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import criu
from kernelproxy.criu import mode_probe as forms
from kernelproxy.criu.sandbox import Form
from kernelproxy.native.tools import sandbox_program

ROOT = Path(__file__).parents[3]
AS_USER = ROOT / "tests" / "programs" / "as_user.py"
NOBODY = 65534

pytestmark = pytest.mark.slow

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be somebody else, and you are an ordinary user already"
)

FIND = """
import json, sys
from pathlib import Path
from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import mode_probe as form
form.STEP_SECONDS = 120.0
try:
    print(json.dumps({"kind": form.find(Path(sys.argv[1])).kind}))
except ProcessError as error:
    print(json.dumps({"reason": error.reason, "why": str(error)}))
"""


class CountingProbe:
    """Stub of CRIU that records its calls."""

    def __init__(self, directory: Path, program: str) -> None:
        self.path, self._calls = directory / "criu", directory / "calls"
        self.write(f'exec {program} "$@"')

    def write(self, does: str) -> None:
        """Set the commands that it runs."""
        self.path.write_text(f'#!/bin/sh\necho "$1" >>{self._calls}\n{does}\n')
        self.path.chmod(0o755)

    def calls(self) -> list[str]:
        """Return its calls since the last time."""
        found = self._calls.read_text().split() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes take as long as they need on a loaded machine."""
    monkeypatch.setattr(forms, "STEP_SECONDS", 120.0)


@pytest.fixture
def counting(criu_program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingProbe:
    counting = CountingProbe(tmp_path, criu_program)
    monkeypatch.setenv(forms.VARIABLE, str(counting.path))
    return counting


@pytest.fixture
def home() -> Iterator[Path]:
    """A home directory of an ordinary user; the directories of tests are closed to others."""
    built = sandbox_program().parent
    with tempfile.TemporaryDirectory(prefix="sing-home-") as name:
        # Compiling takes seconds, and the compiler is not what is tested.
        shutil.copytree(built, Path(name, ".cache", "jupyter_sing", "native", built.name))
        for directory, _, files in os.walk(name):
            for each in (directory, *(os.path.join(directory, file) for file in files)):
                os.chown(each, NOBODY, NOBODY)
        yield Path(name)


def as_user(
    criu_program: str, home: Path, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python as an ordinary user."""
    read = [sys.base_prefix, sys.prefix, str(ROOT), str(Path(criu_program).parent)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    env |= {
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        forms.VARIABLE: criu_program,
    }
    return subprocess.run(
        [sys.executable, str(AS_USER), *options, *read, "--", sys.executable, *arguments],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def found_by(criu_program: str, home: Path, *options: str) -> dict[str, str]:
    """Return the form that an ordinary user finds."""
    done = as_user(criu_program, home, "-c", FIND, str(home / "found"), options=options)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_the_result_of_a_probe_is_kept(counting: CountingProbe, tmp_path: Path) -> None:
    found = forms.find(tmp_path / "kept")
    assert found == Form("root" if os.geteuid() == 0 else "user", str(counting.path))
    assert counting.calls() == ["--version", "dump", "restore"]
    assert forms.find(tmp_path / "kept") == found
    assert counting.calls() == []
    assert forms.find(tmp_path / "kept", fresh=True) == found
    assert counting.calls() == ["--version", "dump", "restore"]
    os.utime(counting.path, (1, 1))  # a changed program
    assert forms.find(tmp_path / "kept") == found
    assert counting.calls() == ["--version", "dump", "restore"]


def test_a_failed_probe_is_not_repeated_soon(
    counting: CountingProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.write('[ "$1" = --version ] && echo Version: 1.0 || exit 1')
    for expected in (True, False):
        with pytest.raises(ProcessError, match=r"cannot be saved \(CRIU 1.0\)") as caught:
            forms.find(tmp_path / "kept")
        assert caught.value.reason == "unavailable"
        assert bool(counting.calls()) is expected
    monkeypatch.setattr(forms, "REFUSAL_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(ProcessError):
            forms.find(tmp_path / "kept", fresh=True)
        counting.calls()
        with pytest.raises(ProcessError):
            forms.find(tmp_path / "kept")
        assert counting.calls()


def test_a_probe_that_timed_out_is_repeated(
    counting: CountingProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.write('[ "$1" = --version ] && echo Version: 1.0 || exec sleep 86403')
    dump = criu.dump

    def dump_soon(*arguments: Any, **options: Any) -> float:
        return dump(*arguments, **{**options, "timeout": 1.0})

    monkeypatch.setattr(criu, "dump", dump_soon)
    for _ in range(2):
        with pytest.raises(ProcessError) as caught:
            forms.find(tmp_path / "kept")
        assert caught.value.reason == "timeout"
        assert counting.calls()


@needs_root
def test_an_ordinary_user_has_a_form(criu_program: str, home: Path) -> None:
    assert found_by(criu_program, home) == {"kind": "user"}


@needs_root
def test_root_in_a_container_has_a_users_form(criu_program: str, home: Path) -> None:
    for directory, _, files in os.walk(home):
        for each in (directory, *(os.path.join(directory, file) for file in files)):
            os.chown(each, 0, 0)
    assert found_by(criu_program, home, "--uid", "0") == {"kind": "user"}


@needs_root
def test_no_mode_is_found_if_namespaces_are_forbidden(criu_program: str, home: Path) -> None:
    found = found_by(criu_program, home, "--no-namespaces")
    assert found["reason"] == "unavailable"
    assert "a namespace of users cannot be made" in found["why"]


SHELL = r"""
cd "$(mktemp -d)"
try() { echo "\$ $*"; "$@" 2>&1; echo "= $?"; }
try whoami; try id; try groups; try id -G
mkdir there; echo text >there/file; tar cf all.tar there; rm -r there
try tar xf all.tar; try cp -p there/file copy; try cp -a there again; try cp -p /etc/passwd passwd
try stat -c '%U %G %u %g %a' there there/file copy again again/file passwd
try chgrp "$(id -g)" copy; try chown "$(id -u)" copy; try chown "$(id -u):$(id -g)" there
try install -m 644 copy installed; try touch installed; try chmod 600 installed; try mkfifo fifo
try mknod device c 1 3; try mkdir /etc/of_mine; try cat /etc/shadow; try test -w /etc
try chroot / true; try sudo -n true; try nice -n -5 true; try hostname other
try ping -c 1 -q -W 0 256.0.0.1; try git init -q clone; try git -C clone status --short
try ssh-keygen -q -N '' -f key; try stat -c %a key; try getent passwd "$(id -u)"
try python3 -c 'import os; print(os.getresuid(), os.getresgid(), os.access("/etc", os.W_OK))'
try sh -c 'grep -E "^(Uid|Gid|Cap(Inh|Prm|Eff|Amb))" /proc/self/status'
"""


@needs_root
def test_a_shell_does_what_it_does_without_a_sandbox(criu_program: str, home: Path) -> None:
    script = home / "script"
    script.write_text(SHELL)
    sandboxed = (
        "import os, sys, subprocess; from kernelproxy.criu import sandbox;"
        "from kernelproxy.criu.sandbox import Form; null = os.open(os.devnull, os.O_WRONLY);"
        "command = sandbox.prefix(Form('user', ''), null) + sys.argv[1:];"
        "sys.exit(subprocess.call(command, pass_fds=[null]))"
    )
    plain = "import sys, subprocess; sys.exit(subprocess.call(sys.argv[1:]))"
    said = [
        as_user(criu_program, home, "-c", code, "bash", str(script)).stdout.splitlines()
        for code in (plain, sandboxed)
    ]
    assert "nobody" in said[0]
    assert "= 0" in said[0]
    # sudo gives another reason: in there, set-user-id programs have only the rights of their user.
    said = [[line for line in each if not line.startswith("sudo: ")] for each in said]
    assert said[1] == said[0]


@needs_root
def test_processes_are_saved_by_an_ordinary_user(criu_program: str, home: Path) -> None:
    """Run the tests of `test_processes` as an ordinary user."""
    tests = ROOT / "tests/integration/kernels/test_processes.py"
    done = as_user(
        criu_program, home, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT),
        "-c", str(ROOT / "pyproject.toml"), str(tests),
    )  # fmt: skip
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in last
    assert "skipped" not in last
