"""Processes that a notebook starts: sessions of their own, and only for those that need one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_sing.cli import commands
from kernelproxy.common.protocol.views import SessionView
from tests.doubles.session.pids import existing
from tests.e2e.kernels import Kernel, kernel, sessions, wait_for_sessions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
#: A program that says whether there is a device, uses it if told so, and waits for a line.
PROGRAM = """
import os, sys, torch
torch.set_num_threads(1)
if "group" in sys.argv:
    torch.distributed.init_process_group("gloo")
seen = torch.cuda.is_available()
total = torch.ones(3, device="cuda").sum().item() if "use" in sys.argv else None
line = f"{os.environ.get('RANK')} {seen} {total} {os.environ['SING_SESSION']}\\n"
if "later" in sys.argv:
    torch.distributed.init_process_group("gloo")
os.write(1, line.encode())
if "wait" in sys.argv:
    sys.stdin.readline()
"""
#: Starts it in a cell, and waits for its line.
START = """
import subprocess, sys
child = subprocess.Popen([sys.executable, {program!r}, *{arguments!r}],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline())
"""


@pytest.fixture
def notebook(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JPY_SESSION_NAME", "lessons/a.ipynb")
    with kernel() as started:
        yield started


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def start(notebook: Kernel, program: Path, *arguments: str) -> list[str]:
    """Start the program in a cell; return the words of its line."""
    ran = notebook.run(START.format(program=str(program), arguments=arguments))
    assert not ran.error, ran.error_text
    return ran.stdout.split()


def below(parent: str) -> list[SessionView]:
    return [each for each in sessions() if each["parent"] == parent]


def own(notebook: Kernel) -> str:
    return notebook.run("import os; print(os.environ['SING_SESSION'])").stdout.strip()


def test_a_program_that_uses_the_device_has_a_session_below_the_notebooks(
    notebook: Kernel, program: Path
) -> None:
    parent = own(notebook)
    _, seen, total, session = start(notebook, program, "use", "wait")
    assert (seen, total) == ("True", "3.0")
    (child,) = below(parent)
    assert (child["id"], child["name"], child["job"]) == (session, "train.py", "")
    assert child["kernel_pid"] not in (None, sessions()[0]["kernel_pid"])
    ran = notebook.run(
        "import torch; print(torch.ones(2, device='cuda').sum().item())\n"
        "print(child.communicate('\\n'), child.returncode)"
    )
    assert ran.stdout == "2.0\n('', None) 0\n"
    wait_for_sessions(lambda found: [each["id"] for each in found] == [parent])


def test_a_program_that_only_imports_torch_has_none(notebook: Kernel, program: Path) -> None:
    parent = own(notebook)
    assert start(notebook, program, "wait") == ["None", "True", "None", parent]
    assert [each["id"] for each in sessions()] == [parent]
    notebook.run("child.communicate('\\n')")


def test_a_killed_program_leaves_no_session(notebook: Kernel, program: Path) -> None:
    parent = own(notebook)
    start(notebook, program, "use", "wait")
    os.kill(existing(below(parent)[0]["kernel_pid"]), signal.SIGKILL)
    wait_for_sessions(lambda found: [each["id"] for each in found] == [parent])
    notebook.run("child.communicate()")


def test_children_lose_the_device_with_the_notebook(notebook: Kernel, program: Path) -> None:
    start(notebook, program, "use", "wait")
    notebook.restart()
    wait_for_sessions(lambda found: not any(each["parent"] for each in found))


def test_children_have_no_device_if_they_are_not_to(notebook: Kernel, program: Path) -> None:
    notebook.run("import os; os.environ['SING_CHILDREN'] = '0'")
    assert start(notebook, program, "wait")[:3] == ["None", "False", "None"]
    notebook.run("child.communicate('\\n')")


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_have_sessions_of_their_own(
    notebook: Kernel, tmp_path: Path, method: str
) -> None:
    (tmp_path / "work.py").write_text(
        "import os, torch\n"
        "torch.set_num_threads(1)\n"
        "def work(number):\n"
        "    total = torch.full((number,), 1.0, device='cuda').sum().item()\n"
        "    return total, os.environ['SING_SESSION']\n"
    )
    parent = own(notebook)
    ran = notebook.run(
        "import json, multiprocessing, os, sys, torch\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); import work\n"
        f"with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "    print(json.dumps(pool.map(work.work, [2, 3], chunksize=1)))\n"
    )
    assert not ran.error, ran.error_text
    (two, first), (three, second) = json.loads(ran.stdout)
    assert (two, three) == (2.0, 3.0)
    assert parent not in (first, second)
    wait_for_sessions(lambda found: [each["id"] for each in found] == [parent])


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_of_loaders_have_no_sessions(notebook: Kernel, tmp_path: Path, method: str) -> None:
    (tmp_path / "squares.py").write_text(
        "import torch\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        torch.manual_seed(index)\n"
        "        return torch.tensor(float(index) ** 2)\n"
    )
    ran = notebook.run(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(tmp_path)!r}); import squares\n"
        "loader = torch.utils.data.DataLoader(squares.Squares(), 2, num_workers=2,\n"
        f"    multiprocessing_context={method!r}, persistent_workers=True)\n"
        "print(sum(x.cuda().sum().item() for x in loader))"
    )
    assert (ran.stdout, ran.error) == ("14.0\n", ""), ran.error_text
    assert len(sessions()) == 1  # the workers live
    notebook.run("del loader")


TORCHRUN = """
import subprocess, sys
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
done = subprocess.run([*command, {program!r}, *{arguments!r}], capture_output=True, text=True)
print(done.stdout, done.returncode)
"""


def test_ranks_of_torchrun_have_sessions_and_their_starter_has_none(
    notebook: Kernel, program: Path
) -> None:
    parent = own(notebook)
    ran = notebook.run(TORCHRUN.format(program=str(program), arguments=["use"]))
    *lines, status = ran.stdout.strip().splitlines()
    assert status.strip() == "0", ran.stdout
    found = sorted(line.split() for line in lines if line)
    assert [line[:3] for line in found] == [["0", "True", "3.0"], ["1", "True", "3.0"]]
    assert len({parent, found[0][3], found[1][3]}) == 3
    wait_for_sessions(lambda there: [each["id"] for each in there] == [parent])
    ran = notebook.run(TORCHRUN.format(program=str(program), arguments=[]))
    assert ran.stdout.count(f"True None {parent}") == 2, ran.stdout


def test_a_kernel_that_a_notebook_starts_has_a_session_of_its_own(
    notebook: Kernel, tmp_path: Path
) -> None:
    cell: dict[str, Any] = {
        "cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [],
        "source": "import os, torch; print(torch.ones(2, device='cuda').sum().item())\n"
        "env = os.environ; print(env['SING_SESSION'], env['SING_CLIENT'] == str(os.getpid()))",
    }  # fmt: skip
    (tmp_path / "b.ipynb").write_text(
        json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    parent = own(notebook)
    ran = notebook.run(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'jupyter', 'execute', '--inplace', 'b.ipynb']\n"
        f"done = subprocess.run(command, cwd={str(tmp_path)!r}, capture_output=True, text=True)\n"
        "print(done.returncode, done.stderr[-2000:])"
    )
    assert ran.stdout.startswith("0 "), ran.stdout
    made = json.loads((tmp_path / "b.ipynb").read_text())["cells"][0]["outputs"]
    (first, second) = "".join("".join(each["text"]) for each in made).splitlines()
    assert first == "2.0"
    session, is_client = second.split()
    assert (session != parent, is_client) == (True, "True")


def test_a_program_of_run_in_a_notebook_has_a_session_by_itself(
    notebook: Kernel, program: Path
) -> None:
    parent = own(notebook)
    ran = notebook.run(
        "import subprocess, sys\n"
        f"command = [sys.executable, '-m', 'jupyter_sing.cli', 'run', {str(program)!r}, 'use']\n"
        f"env = dict(os.environ, PYTHONPATH=os.environ['PYTHONPATH'] + ':' + {str(ROOT)!r})\n"
        "done = subprocess.run(command, capture_output=True, text=True, env=env)\n"
        "print(done.stdout, done.stderr[-2000:])"
    )
    rank, seen, total, session = ran.stdout.split()
    assert (rank, seen, total) == ("None", "True", "3.0")
    assert session != parent
    wait_for_sessions(lambda found: [each["id"] for each in found] == [parent])


def test_another_python_without_torch_starts_as_ever(notebook: Kernel) -> None:
    ran = notebook.run(
        "import subprocess\n"
        "command = ['/usr/bin/python3', '-c', 'import sys; print(sys.version_info[0])']\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "print(done.stdout, done.stderr)"
    )
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no other Python here")
    assert ran.stdout.split() == ["3"]


def test_ranks_of_run_have_sessions_named_after_the_program(
    runtime_dir: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, "--name", "mine", program, "use", "wait"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines = sorted(process.stdout.readline().split() for _ in range(2))
        assert [line[:3] for line in lines] == [["0", "True", "3.0"], ["1", "True", "3.0"]]
        found = sorted(sessions(), key=lambda each: each["name"])
        assert [each["name"] for each in found] == ["mine rank 0", "mine rank 1"]
        assert [each["id"] for each in found] == [line[3] for line in lines]
        assert {each["device"] for each in found} == {"cpu:0", "cpu:1"}
        assert {each["parent"] for each in found} == {""}
        process.kill()
        wait_for_sessions(lambda there: there == [])


@pytest.mark.parametrize("when", ["group", "later"])
def test_ranks_are_shown_as_one_job(
    notebook: Kernel, program: Path, when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their group is made before or after they use the device."""
    parent = own(notebook)
    ran = notebook.run(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'torch.distributed.run', '--standalone']\n"
        f"command += ['--nproc-per-node', '2', {str(program)!r}, 'use', {when!r}, 'wait']\n"
        "job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(job.stdout.readline(), job.stdout.readline())"
    )
    assert not ran.error, ran.error_text
    ranks = sorted(below(parent), key=lambda each: each["name"])
    assert [(each["rank"], each["ranks"]) for each in ranks] == [(0, 2), (1, 2)]
    assert len({each["job"] for each in ranks} - {""}) == 1
    assert commands.main(["status"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["train.py", "2", "ranks", "on", "1", "device"] in [line[:6] for line in lines]
    assert ["rank", "1"] in [line[1:3] for line in lines]
    notebook.run("job.communicate()")
    wait_for_sessions(lambda there: [each["id"] for each in there] == [parent])
