"""``jupyter sing run --nproc-per-node``: ranks started as by torchrun, and what ends them."""

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
from kernelproxy.common.protocol import OpenSession, Prepare
from tests.doubles.waiting import wait_until
from tests.unit.fake_daemon import SESSION, FakeDaemon

pytest.importorskip("torch.distributed.run")

ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 120

#: Writes what a rank finds; then it ends as its arguments say.
PROGRAM = """
import json, os, sys, time
rank, out = os.environ["RANK"], sys.argv[1]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SING_NAME", "SING_DEVICE",
         "SING_SESSION", "CUDA_VISIBLE_DEVICES")
facts = {name: os.environ.get(name) for name in names}
facts |= {"argv": sys.argv, "pid": os.getpid(), "modules": [m for m in sys.modules if m == "torch"],
          "path": [each for each in sys.path if "bundle" in each], "beside": sys.path[0],
          "search": os.environ.get("PYTHONPATH", "")}
with open(f"{out}/{rank}.partial", "w") as file:
    json.dump(facts, file)
os.rename(f"{out}/{rank}.partial", f"{out}/{rank}.json")
if sys.argv[2:] == ["sleeps"]:
    time.sleep(1000)
if sys.argv[2:] == ["fails"] and rank == "1":
    sys.exit(7)
if sys.argv[2:] == ["dies"] and rank == "1":
    os.abort()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def found(script: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Return what the ranks have written."""
    files = [script.parent / "out" / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def run(script: Path, *arguments: str, options: tuple[str, ...] = ()) -> int:
    out = str(script.parent / "out")
    return commands.main(["run", "--nproc-per-node", "2", *options, str(script), out, *arguments])


def test_ranks_find_what_torchrun_gives_them(
    fake_daemon: FakeDaemon, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    monkeypatch.setenv("SING_SESSION", "of the notebook in which this is started")
    assert run(script, options=("--name", "mine", "--device", "cpu:1")) == 0
    first, second = found(script)
    out = str(script.parent / "out")
    assert (first["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["argv"] == [str(script), out]
    assert first["beside"] == str(script.parent)
    assert (first["SING_NAME"], first["SING_DEVICE"], first["SING_SESSION"]) == (
        "mine", "cpu:1", None,
    )  # fmt: skip
    # A rank imports nothing of ours, nor torch, by itself; and opens no session.
    assert (first["modules"], first["path"]) == ([], [])
    assert first["search"].split(os.pathsep)[0].endswith("activation/children")
    (prepared,) = fake_daemon.requests
    assert prepared == Prepare(sys.executable, ranks=2, user="ada", device="cpu:1")


@pytest.mark.parametrize(("ending", "status"), [("fails", 7), ("dies", 128 + signal.SIGABRT)])
def test_the_status_of_the_first_rank_that_fails_is_returned(
    fake_daemon: FakeDaemon, script: Path, ending: str, status: int
) -> None:
    assert run(script, ending) == status
    assert not any(isinstance(each, OpenSession) for each in fake_daemon.requests)


@pytest.fixture
def started(fake_daemon: FakeDaemon, script: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process of its own, whose ranks sleep."""
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*command, str(script), str(script.parent / "out"), "sleeps"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(list((script.parent / "out").glob("*.json"))) == 2)
        yield process
    finally:
        process.kill()
        process.wait()


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def processes(started: subprocess.Popen[bytes], script: Path) -> list[int]:
    """Return the process that starts the ranks, and the ranks."""
    ranks = [each["pid"] for each in found(script)]
    status = Path(f"/proc/{ranks[0]}/status").read_text()
    (launcher,) = (int(line.split()[1]) for line in status.splitlines() if "PPid" in line)
    assert launcher != started.pid
    return [launcher, *ranks]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_ends_all_ranks(
    started: subprocess.Popen[bytes], script: Path, number: signal.Signals
) -> None:
    family = processes(started, script)
    started.send_signal(number)
    assert started.wait(WAIT_SECONDS) == 128 + number
    wait_until(lambda: not any(map(lives, family)))


def test_an_interrupt_of_the_terminal_ends_all_ranks(
    started: subprocess.Popen[bytes], script: Path
) -> None:
    family = processes(started, script)
    for pid in (started.pid, family[0]):  # torchrun's ranks are not in the terminal's group
        os.kill(pid, signal.SIGINT)
    assert started.wait(WAIT_SECONDS) == 128 + signal.SIGINT
    wait_until(lambda: not any(map(lives, family)))


def test_a_killed_command_leaves_nothing_behind(
    started: subprocess.Popen[bytes], script: Path
) -> None:
    family = processes(started, script)
    started.kill()
    wait_until(lambda: not any(map(lives, family)))


def test_a_killed_launcher_leaves_no_ranks(started: subprocess.Popen[bytes], script: Path) -> None:
    launcher, *ranks = processes(started, script)
    os.kill(launcher, signal.SIGKILL)
    assert started.wait(WAIT_SECONDS) == 128 + signal.SIGKILL
    wait_until(lambda: not any(map(lives, ranks)))


@pytest.mark.parametrize("ranks", ["auto", "gpu", "0", "-1", "65", "2:4", ""])
def test_an_invalid_number_of_ranks_is_an_error_of_usage(
    ranks: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["run", f"--nproc-per-node={ranks}", str(script)])
    assert ended.value.code == 2
    assert f"{ranks!r} is no number from 1 to 64" in capsys.readouterr().err


def test_ranks_without_a_daemon_run_on_the_cpu(
    runtime_dir: Path, script: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "abacus")  # it cannot start
    assert run(script) == 0
    first, _ = found(script)
    assert (first["SING_NAME"], first["CUDA_VISIBLE_DEVICES"]) == (None, "-1")
    assert "children" not in first["search"]
    assert "jupyter_sing: CPU only: " in capfd.readouterr().err


def test_ranks_that_the_daemon_does_not_allow_do_not_start(
    fake_daemon: FakeDaemon, script: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from kernelproxy.common import protocol

    answer = fake_daemon._answer
    refusal = protocol.Error("The policy does not let eve use devices.", "not-allowed")
    monkeypatch.setattr(
        fake_daemon, "_answer",
        lambda request: refusal if isinstance(request, Prepare) else answer(request),
    )  # fmt: skip
    assert run(script) == 1
    assert capfd.readouterr().err == ("jupyter sing: The policy does not let eve use devices.\n")
    assert not list((script.parent / "out").iterdir())
    assert fake_daemon.sessions.keys() == {SESSION["id"]}
