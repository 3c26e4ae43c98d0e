"""Notebooks that are saved with the processes that they have started, under the agent and CRIU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import CheckpointsReply, CheckpointsRequest
from kernelproxy.criu import mode_probe as forms
from kernelproxy.criu.sandbox import Form
from tests.doubles.free_ports import free_ports
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, Kernel, kernel, sessions, wait_for_sessions
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once, supervisor_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
RANKS, STEPS = 2, 40
BEGIN = f"""\
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch
from tests.programs.jobs import saved
own = torch.ones(3, device='cuda')
"""


@pytest.fixture(autouse=True)
def _form(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv(forms.VARIABLE, forms.find_criu())
        monkeypatch.setattr(forms, "STEP_SECONDS", SECONDS_MAX)
        forms.find(runtime_dir)
    except ProcessError as error:
        if forms.VARIABLE in os.environ:
            raise
        pytest.skip(str(error))
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kernels() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ran(notebook: Kernel, code: str) -> str:
    found = notebook.run(code)
    assert found.error == "", f"{found.error}: {found.error_text}"
    assert found.stderr == ""
    return found.stdout


def start(function: str, *arguments: object, method: str = "spawn") -> str:
    """Return code that starts a function of `saved` in several processes."""
    given = ", ".join(map(repr, arguments))
    return (
        f"job = torch.multiprocessing.start_processes(saved.{function}, ({given},), "
        f"nprocs={RANKS}, join=False, start_method={method!r})"
    )


def begun(directory: Path, step: int = 5, ranks: int = RANKS) -> None:
    """Wait until all ranks have done some steps."""

    def done(rank: int) -> bool:
        path = directory / f"step-{rank}"
        return path.exists() and int(path.read_text()) >= step

    wait_until(lambda: all(done(rank) for rank in range(ranks)), SECONDS_MAX)


def results(notebook: Kernel, directory: Path) -> list[str]:
    """Let the job end; return what its ranks have written, and remove it."""
    (directory / "go").touch()
    ran(notebook, "while not job.join(): pass")
    wait_for_sessions(lambda found: len(found) == 1)
    found = []
    for rank in range(RANKS):
        (directory / f"step-{rank}").unlink()
        path = directory / f"found-{rank}"
        found.append(path.read_text())
        path.unlink()
    (directory / "go").unlink()
    return found


def forms_of(name: str) -> list[str]:
    with connect(start=False) as control:
        reply = control.expect(CheckpointsReply, CheckpointsRequest(), 60.0)
    (found,) = (each["forms"] for each in reply.checkpoints if each["name"] == name)
    return list(found)


def kill_everything() -> None:
    agent = agent_pid()
    pids = {pid for each in sessions() for pid in (each["kernel_pid"], each["worker_pid"]) if pid}
    kill_at_once(agent, supervisor_of(agent), *pids)


def test_processes_of_a_notebook_come_back_with_it(kernels: ExitStack, tmp_path: Path) -> None:
    first = kernels.enter_context(kernel())
    ran(first, BEGIN)
    begin = start("alone", str(tmp_path), STEPS)
    ran(first, begin)
    expected = results(first, tmp_path)
    ran(first, begin)
    begun(tmp_path)
    ran(first, "%sing checkpoint one --form process")
    assert forms_of("one") == ["namespace", "process"]
    assert results(first, tmp_path) == expected
    kill_everything()
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    assert results(second, tmp_path) == expected
    assert ran(second, "print(own.sum().item())") == "3.0\n"
    wait_for_sessions(lambda found: len(found) == 1)


def train(directory: Path, meet: str = "file") -> str:
    """Return code that starts ranks which train; they meet at a file, or by TCP."""
    place = directory / "meet"
    place.unlink(missing_ok=True)
    where = f"file://{place}" if meet == "file" else f"tcp://127.0.0.1:{free_ports(1)[0]}"
    return start("train", RANKS, str(directory), STEPS, "mlp", where, method="fork")


@pytest.mark.parametrize(("meet", "devices"), [("file", 2), ("tcp", 1)])
def test_a_job_comes_back_with_its_notebook(
    kernels: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meet: str, devices: int
) -> None:
    """On one device its ranks share a process."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", ",".join(["cpu:1GiB@1"] * devices))
    first = kernels.enter_context(kernel())
    ran(first, BEGIN)
    ran(first, train(tmp_path, meet))
    expected = results(first, tmp_path)
    ran(first, train(tmp_path, meet))
    begun(tmp_path)
    ran(first, "%sing checkpoint one --form process")
    assert results(first, tmp_path) == expected
    kill_everything()
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    assert results(second, tmp_path) == expected


def test_a_job_continues_beside_its_copy(kernels: ExitStack, tmp_path: Path) -> None:
    """The copy is restored while the ranks of the original wait for each other."""
    first = kernels.enter_context(kernel())
    ran(first, BEGIN)
    ran(first, start("wait_for_the_last", RANKS, str(tmp_path), method="fork"))
    begun(tmp_path, 0)
    ran(first, "%sing checkpoint one")
    assert forms_of("one") == ["namespace", "process"]
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    found = wait_for_sessions(lambda found: sum(bool(each["job"]) for each in found) == 2 * RANKS)
    jobs = {each["parent"]: each["job"] for each in found if each["job"]}
    assert len(set(jobs.values())) == 2
    # A copy may be saved and restored as the original.
    ran(second, "%sing checkpoint two --form process")
    assert "with the process" in ran(second, "%sing restore two")
    (tmp_path / "go").touch()
    ran(first, "while not job.join(): pass")
    ran(second, "while not job.join(): pass")
    lines = [path.read_text().splitlines() for path in sorted(tmp_path.glob("found-*"))]
    assert len(lines) == RANKS
    for each in lines:  # both have appended one
        assert len(each) == 2
        assert len(set(each)) == 1


def test_a_program_of_a_notebook_without_a_device_comes_back(
    kernels: ExitStack, tmp_path: Path
) -> None:
    first = kernels.enter_context(kernel())
    program = ["-m", "tests.programs.jobs.saved", str(tmp_path), str(STEPS)]
    command = f"[sys.executable, *{program}]"
    ran(first, f"import subprocess, sys; job = subprocess.Popen({command})")
    begun(tmp_path, ranks=1)
    ran(first, "%sing checkpoint one --form process")
    (tmp_path / "go").touch()
    assert ran(first, "print(job.wait())") == "0\n"
    expected = (tmp_path / "found-0").read_text()
    (tmp_path / "found-0").unlink()
    wait_for_sessions(lambda found: len(found) == 1)
    kill_everything()
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    assert ran(second, "print(job.wait())") == "0\n"
    assert (tmp_path / "found-0").read_text() == expected


def test_a_job_that_cannot_be_saved_continues(kernels: ExitStack, tmp_path: Path) -> None:
    notebook = kernels.enter_context(kernel())
    ran(notebook, BEGIN)
    ran(notebook, "from torch.distributed import TCPStore")
    ran(notebook, start("wait_for_the_last", RANKS, str(tmp_path), method="fork"))
    begun(tmp_path, 0)
    ran(notebook, "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)")
    refused = notebook.run("%sing checkpoint one --form process").stderr
    assert refused.startswith("jupyter_sing: the process cannot be saved: it uses io_uring")
    assert "io_uring" in ran(notebook, "%sing checkpoint one")
    assert forms_of("one") == ["namespace"]
    (tmp_path / "go").touch()
    ran(notebook, "while not job.join(): pass")
    assert len({path.read_text() for path in tmp_path.glob("found-*")}) == 1
    wait_for_sessions(lambda found: len(found) == 1)


def test_a_job_without_shared_memory_is_saved_without_root(
    kernels: ExitStack, tmp_path: Path, runtime_dir: Path
) -> None:
    program = forms.find_criu()
    try:
        forms._try(Form("user", program))
    except ProcessError as error:
        pytest.skip(str(error))
    forms._remember(runtime_dir / forms.CACHE, {"key": forms._key(program), "kind": "user"})
    first = kernels.enter_context(kernel())
    ran(first, BEGIN)
    ran(first, start("wait_for_the_last", RANKS, str(tmp_path), method="fork"))
    begun(tmp_path, 0)
    refused = first.run("%sing checkpoint one --form process").stderr
    assert "it shares memory (sing-outbox)" in refused
    (tmp_path / "go").touch()
    ran(first, "while not job.join(): pass")
    for name in ("go", "meet-the-last", *(f"step-{rank}" for rank in range(RANKS))):
        (tmp_path / name).unlink(missing_ok=True)
    ran(first, "%env SING_OUTBOX=0")
    ran(first, start("wait_for_the_last", RANKS, str(tmp_path), method="fork"))
    begun(tmp_path, 0)
    ran(first, "%sing checkpoint one --form process")
    kill_everything()
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    (tmp_path / "go").touch()
    ran(second, "while not job.join(): pass")
    for path in tmp_path.glob("found-*"):
        assert len(lines := path.read_text().splitlines()) == 2
        assert len(set(lines)) == 1


def test_a_process_that_has_not_used_the_device_yet_comes_back(
    kernels: ExitStack, tmp_path: Path
) -> None:
    """The copy belongs to the restored notebook, although the original continues beside it."""
    first = kernels.enter_context(kernel())
    ran(first, BEGIN)
    ran(first, start("use_later", str(tmp_path), method="fork"))
    begun(tmp_path, 0)
    ran(first, "%sing checkpoint one --form process")
    second = kernels.enter_context(kernel())
    assert "with the process" in ran(second, "%sing restore one")
    (tmp_path / "go").touch()
    found = wait_for_sessions(lambda found: len(found) == 2 + 2 * RANKS)
    assert sorted(Counter(each["parent"] for each in found).values()) == [2, RANKS, RANKS]
    (tmp_path / "end").touch()
    for each in (first, second):
        ran(each, "while not job.join(): pass")
