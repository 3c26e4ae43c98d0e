"""A job of which something ends, waits for ever, or is suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    MigrateRequest,
    Pin,
    Resume,
    SessionReply,
    Suspend,
)
from tests.doubles.waiting import wait_until
from tests.e2e.conductor import PROGRAM, ROOT, ConductedRank, Conductor, conductor
from tests.e2e.kernels import Kernel, kernel, sessions, wait_for_sessions
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once, lives, supervisor_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECONDS_MAX = 120
ENDED = "DistBackendError: process group '0': the process of rank 1 has ended"


@pytest.fixture(autouse=True)
def _own_daemon(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a daemon of its own."""
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:512MiB@1,cpu:512MiB@1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def conducting(tmp_path: Path) -> Iterator[Conductor]:
    with conductor(tmp_path) as made:
        yield made


@pytest.fixture
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert not started.run("import torch; x = torch.ones(2, device='cuda'); x.sum()").error
        yield started


@contextlib.contextmanager
def command(conducting: Conductor, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """Start ranks by the command line."""
    words = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", str(ranks)]
    with subprocess.Popen(
        [*words, str(PROGRAM), str(conducting.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def start(conducting: Conductor, launcher: str, ranks: int) -> str:
    return str(getattr(conducting, launcher)(ranks))


def only_the_notebook(ranks: list[ConductedRank]) -> None:
    """Wait until nothing of a job is left but the notebook that has started it."""
    wait_until(lambda: not any(lives(rank.pid) for rank in ranks))
    wait_for_sessions(lambda found: [each["parent"] for each in found] == [""])


@pytest.mark.parametrize(
    ("launcher", "way"),
    [
        ("torchrun", "killed"), ("spawn", "fail"), ("notebook_launcher", "killed"),
        *(pytest.param(launcher, way, marks=pytest.mark.exhaustive) for launcher, way in (
            ("torchrun", "fail"), ("spawn", "killed"), ("notebook_launcher", "fail"),
        )),
    ],
)  # fmt: skip
def test_a_launcher_ends_with_its_usual_error_when_a_rank_ends(
    notebook: Kernel, conducting: Conductor, launcher: str, way: str
) -> None:
    cell = notebook.begin(start(conducting, launcher, 2))
    ranks = conducting.ranks(2)
    ranks[0].tell("add")
    if way == "killed":
        os.kill(ranks[1].pid, signal.SIGKILL)
    else:
        assert ranks[1].do("fail") == "ValueError: a rank that fails"
    ran = notebook.finish(cell)
    # The launcher may have ended it before it notices.
    assert ranks[0].answer() in (ENDED, "")
    if launcher == "torchrun":
        assert "status 1" in ran.stdout
        assert "exitcode  : -9" in ran.stdout or way == "fail"
    elif launcher == "spawn":
        assert ran.error in ("ProcessExitedException", "ProcessRaisedException"), ran
    else:
        assert "fail" in ran.error_text or "terminated with signal SIGKILL" in ran.error_text
    only_the_notebook(ranks)
    ran = notebook.run("print(x.sum().item())")
    assert ran.stdout == "2.0\n", ran.error_text


def test_ranks_that_torchrun_starts_again_work(notebook: Kernel, conducting: Conductor) -> None:
    cell = notebook.begin(conducting.torchrun(2, "--max-restarts", "1"))
    first = conducting.ranks(2)
    for rank in first:
        rank.tell("add")
    assert [rank.answer() for rank in first] == ["3.0"] * 2
    first[0].tell("add")
    os.kill(first[1].pid, signal.SIGKILL)
    second = conducting.ranks(2)
    assert [rank.restarts for rank in second] == [1, 1]
    for rank in second:
        rank.tell("add")
    assert [rank.answer() for rank in second] == ["3.0"] * 2
    wait_for_sessions(lambda found: len(found) == 3)
    conducting.dismiss()
    assert notebook.finish(cell).stdout.startswith("status 0")
    only_the_notebook(first + second)


def test_the_command_ends_with_an_error_when_daemon_and_supervisor_die(
    conducting: Conductor,
) -> None:
    with command(conducting, 2) as process:
        ranks = conducting.ranks(2)
        ranks[0].tell("add")  # the other one waits for its input, and never calls
        agent = agent_pid()
        kill_at_once(agent, supervisor_of(agent))
        answer = ranks[0].answer()
        assert answer.endswith("the device session of rank 0 has ended") or "is gone" in answer
        assert process.wait(SECONDS_MAX) == 1
        wait_until(lambda: not any(lives(rank.pid) for rank in ranks))


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("torchrun", "killed"), ("spawn", "interrupted"), ("notebook_launcher", "restarted"),
        *(pytest.param(launcher, how, marks=pytest.mark.exhaustive) for launcher, how in (
            ("torchrun", "interrupted"), ("torchrun", "restarted"), ("spawn", "restarted"),
            ("spawn", "killed"), ("notebook_launcher", "interrupted"),
            ("notebook_launcher", "killed"),
        )),
    ],
)  # fmt: skip
def test_ranks_end_with_their_cell(
    notebook: Kernel, conducting: Conductor, launcher: str, how: str
) -> None:
    """One rank waits for the other one, which computes for ever, or reads something."""
    cell = notebook.begin(start(conducting, launcher, 2))
    ranks = conducting.ranks(2)
    ranks[0].tell("add")
    if how == "interrupted":
        ranks[1].tell("compute")
    if how == "interrupted":
        notebook.manager.interrupt_kernel()
        ran = notebook.finish(cell)
        assert ran.error, ran
    elif how == "restarted":
        notebook.restart()
    else:
        (kernel_pid,) = (each["kernel_pid"] for each in sessions() if not each["parent"])
        assert kernel_pid is not None
        os.kill(kernel_pid, signal.SIGKILL)
    wait_until(lambda: not any(lives(rank.pid) for rank in ranks))
    wait_for_sessions(lambda found: not any(each["parent"] for each in found))


def ask(request: Suspend | Resume | MigrateRequest | Pin) -> None:
    with agent_client.connect(start=False) as connection:
        connection.expect(SessionReply, request, SECONDS_MAX)


def train(ranks: list[ConductedRank], steps: int) -> str:
    """Train; return the hash of the weights, of which each rank has the same."""
    for rank in ranks:
        rank.tell(f"train {steps}")
    (found,) = {rank.answer() for rank in ranks}
    return found


def test_other_ranks_wait_for_one_that_is_suspended_and_learn_of_one_that_ends(
    conducting: Conductor,
) -> None:
    with command(conducting, 3) as process:
        ranks = conducting.ranks(3)
        before = train(ranks, 1)
        for rank in ranks[:2]:
            rank.tell("train 1")
        ask(Suspend(ranks[2].session))
        ask(MigrateRequest(ranks[0].session, "cpu:1"))
        ask(Resume(ranks[2].session))
        ask(Pin(ranks[2].session, True))
        ranks[2].tell("train 1")
        after = {rank.answer() for rank in ranks}
        assert len(after) == 1
        assert before not in after
        ask(Pin(ranks[2].session, False))
        ask(Suspend(ranks[2].session))
        ranks[0].tell("add")
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert ranks[0].answer() in (ENDED, "")
        assert process.wait(SECONDS_MAX) == 128 + signal.SIGKILL
        wait_until(lambda: not any(lives(rank.pid) for rank in ranks))
        wait_for_sessions(lambda found: found == [])


def test_ranks_that_call_different_things_get_an_error_and_work_in_a_new_group(
    conducting: Conductor,
) -> None:
    different = [("add 1", "add 2"), ("add 1 float32", "add 1 float64"),
                 ("add 1 float32 SUM", "add 1 float32 MAX"), ("add", "gather")]  # fmt: skip
    with command(conducting, 2) as process:
        ranks = conducting.ranks(2)
        for calls in different:
            for rank, call in zip(ranks, calls, strict=True):
                rank.tell(f"catch {call}")
            for rank in ranks:
                assert "the ranks call different collectives: rank " in rank.answer()
            for expected in ("again", "3.0"):
                for rank in ranks:
                    rank.tell(expected.replace("3.0", "add"))
                assert [rank.answer() for rank in ranks] == [expected] * 2
        conducting.dismiss()
        assert process.wait(SECONDS_MAX) == 0


def test_a_notebook_is_suspended_and_saved_while_its_ranks_train(
    notebook: Kernel, conducting: Conductor
) -> None:
    launch = conducting.torchrun(2).replace("done = subprocess.run(", "job = subprocess.Popen(")
    launch = launch.rsplit("\n", 1)[0]
    ran = notebook.run(launch)
    assert not ran.error, ran.error_text
    ranks = conducting.ranks(2)
    (parent,) = (each["id"] for each in sessions() if not each["parent"])
    first = train(ranks, 2)
    ask(Suspend(parent))
    second = train(ranks, 2)
    assert second != first
    ran = notebook.run("print(x.sum().item())")
    assert ran.stdout == "2.0\n"
    ran = notebook.run("y = 5\n%sing checkpoint here")
    assert "Saved checkpoint here" in ran.stdout
    assert "not saved: job: a process" in ran.stdout
    ran = notebook.run("y = 6\n%sing restore here")
    assert "Restored" in ran.stdout
    assert notebook.run("print(y, x.sum().item())").stdout == "5 2.0\n"
    assert train(ranks, 2) not in (first, second)
    conducting.dismiss()
    only_the_notebook(ranks)
