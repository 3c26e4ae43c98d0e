"""Notebooks that are saved and restored, whichever process has died in between."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_sing.cli import commands
from jupyter_sing.notebook.checkpoint_outcome import NOT_SAVED
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import Kernel, kernel, sessions
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once, lives, supervisor_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NOTEBOOK = """\
import random, socket
import numpy as np
import torch
random.seed(1); np.random.seed(2); torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
net[2].weight = net[0].weight  # tied
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
batch = torch.randn(32, 64, device='cuda')
part = batch[4:8, 2:]  # a view
unwritten = torch.empty(5000, device='cuda')
begun = torch.empty(5000, device='cuda')
begun[:3].copy_(torch.tensor([1.0, 2.0, 3.0]))
array = np.arange(50_000.0)
slice_ = array[10:20]
losses = []
connection = socket.socket()
def train(steps):
    for _ in range(steps):
        noise = torch.rand(32, 64, device='cuda') * random.random() * np.random.rand()
        loss = torch.nn.functional.dropout(net(batch + noise), 0.1).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        losses.append(loss.item().hex())
    return losses[-steps:]
train(7)
"""
GO_ON = "print(*train(10))"
CHECK = """\
print(net[2].weight is net[0].weight, optimizer.param_groups[0]['params'][0] is net[0].weight,
      part.data_ptr() - batch.data_ptr(), part.stride(), np.shares_memory(array, slice_),
      train.__globals__ is globals(), 'connection' in globals(), len(losses),
      begun[:4].tolist(), begun.sum().item(), unwritten.sum().item())
"""
CHECKED = "True True 1032 (64, 1) True True False 7 [1.0, 2.0, 3.0, 0.0] 6.0 0.0"


@pytest.fixture(autouse=True)
def data(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_SING_SAVE_PROCESS", "0")  # it would save what is left out here
    return tmp_path / "data"


def said(notebook: Kernel, code: str) -> str:
    ran = notebook.run(code)
    assert (ran.error, ran.stderr) == ("", ""), code
    return ran.stdout.strip()


def listed() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "jupyter_sing.cli", "checkpoints", "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    return list(json.loads(done.stdout)["checkpoints"])


def test_a_checkpoint_is_restored_after_all_processes_were_killed() -> None:
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        text = said(notebook, "%sing checkpoint mine")
        assert text.startswith("Saved checkpoint mine: ")
        assert text.endswith("not saved: connection: a socket")
        expected = said(notebook, GO_ON)
        (session,) = sessions()
        agent = agent_pid()
        pids = (session["kernel_pid"], session["worker_pid"])
        family = [*map(existing, pids), agent, supervisor_of(agent)]
        random.Random(1).shuffle(family)
        kill_at_once(*family)
    with kernel() as notebook:
        assert said(notebook, "%sing restore mine").startswith("Restored ")
        assert said(notebook, CHECK) == CHECKED
        assert said(notebook, GO_ON) == expected
    (made,) = listed()
    assert (made["name"], made["automatic"], made["device"]) == ("mine", False, "cpu:0")
    assert [each["name"] for each in made["omitted"]] == ["connection"]


def test_rolling_back_three_times() -> None:
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        said(notebook, "%sing checkpoint mine")
        expected = said(notebook, GO_ON)
        for _ in range(3):
            notebook.run("later = 1; del batch; array[:] = 0; train(3)")
            said(notebook, "%sing restore mine")
            assert said(notebook, CHECK) == CHECKED
            assert said(notebook, "print('later' in globals())") == "False"
            assert said(notebook, GO_ON) == expected


@pytest.mark.parametrize("saves_process", ["0", "1"])
def test_files_are_what_they_were_and_what_is_there_is_kept_aside(
    tmp_path: Path, data: Path, saves_process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_SAVE_PROCESS", saves_process)
    work = tmp_path / "work"
    work.mkdir()
    (work / "read.txt").write_text("not ours")
    with kernel() as notebook:
        said(
            notebook,
            f"import os\nos.chdir({str(work)!r})\nopen('read.txt').read()\n"
            "open('table.csv', 'w').write('1,2'); out = open('log.txt', 'w+')\n"
            "_ = out.write('first line\\n'); out.flush(); os.system('echo child > child.txt');",
        )
        made = said(notebook, "%sing checkpoint mine")
        assert made.startswith("Saved checkpoint mine: ")
        assert " and 3 files, " in made
        said(
            notebook,
            "open('table.csv', 'w').write('changed'); os.remove('child.txt')\n"
            "_ = out.write('second line\\n'); out.flush(); open('new.txt', 'w').write('new');",
        )
        (work / "read.txt").write_text("somebody else's")
        text = said(notebook, "%sing restore mine")
        assert "and 3 files from mine" in text
        assert (work / "table.csv").read_text() == "1,2"
        assert (work / "child.txt").read_text() == "child\n"
        assert (work / "log.txt").read_text() == "first line\n"
        said(notebook, "_ = out.write('other line\\n'); out.flush()")
        assert (work / "log.txt").read_text() == "first line\nother line\n"
        assert (work / "new.txt").read_text() == "new"  # made since: not restored
        assert (work / "read.txt").read_text() == "somebody else's"
        (aside,) = (data / "aside").iterdir()
        kept = aside / (work / "table.csv").relative_to("/")
        assert kept.read_text() == "changed"
        assert str(kept) in text
    with kernel() as notebook:  # and they stay in the notebook's checkpoint
        (work / "table.csv").unlink()
        said(notebook, "%sing restore mine")
        assert (work / "table.csv").read_text() == "1,2"
        assert " and 3 files, " in said(notebook, "%sing checkpoint again")


def test_two_notebooks_from_one_checkpoint_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernel() as first:
        first.run(NOTEBOOK)
        said(first, "%sing checkpoint mine")
        with kernel() as second, kernel() as third:
            for notebook in (second, third):
                said(notebook, "%sing restore mine")
            assert {each["device"] for each in sessions()} == {"cpu:0", "cpu:1"}
            expected = said(first, GO_ON)
            second.run("array[:] = 0; batch.zero_()")
            assert said(third, GO_ON) == expected
            assert said(third, "print(array[-1])") == "49999.0"


def test_an_external_request_waits_for_the_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        cell = notebook.begin(
            f"import os, time\nprint('in it', flush=True)\n"
            f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\nafter = 5"
        )
        notebook.finish(cell, until=lambda ran: "in it" in ran.stdout)
        (session,) = sessions()
        command = [sys.executable, "-m", "jupyter_sing.cli", "checkpoint", session["id"]]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as asking:
            try:
                assert asking.stderr is not None
                assert asking.stderr.readline().startswith(b"Waiting for ")
            finally:
                go.touch()  # otherwise neither the cell nor the command would ever end
            notebook.finish(cell)
            asking.communicate(timeout=100)
        assert asking.returncode == 0
        (made,) = listed()
        assert "after" in [each["name"] for each in made["saved"]]
        expected = said(notebook, GO_ON)
        capsys.readouterr()
        assert commands.main(["restore", made["name"]]) == 0  # into the same kernel
        assert capsys.readouterr().out.startswith("Restored ")
        assert said(notebook, "print(after)") == "5"
        assert said(notebook, GO_ON) == expected
        assert commands.main(["checkpoint-delete", made["name"]]) == 0
        assert listed() == []


def test_a_program_has_no_notebook(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, sys\nt = torch.ones(3).cuda().sum().item()\n"
        "print(t, flush=True)\nsys.stdin.readline()\n"
    )
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", str(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"3.0\n"
        (session,) = sessions()
        assert commands.main(["checkpoint", session["id"]]) == 1
        assert "only notebooks have checkpoints" in capsys.readouterr().err
        program.communicate(b"\n", timeout=60)
    assert program.returncode == 0


def test_an_unchanged_notebook_costs_next_to_nothing_again(data: Path) -> None:
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        notebook.run("weights = torch.rand(4 << 20, device='cuda'); host = np.random.rand(1 << 20)")
        said(notebook, "%sing checkpoint one")
        before = size_of(data)
        assert before > 20 << 20
        said(notebook, "%sing checkpoint two")
        assert size_of(data) - before < before // 50
    assert {each["name"] for each in listed()} == {"one", "two"}


def size_of(directory: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in directory.rglob("*") if each.is_file())


def test_a_bad_checkpoint_is_refused_and_changes_nothing(data: Path) -> None:
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        said(notebook, "%sing checkpoint mine")
        said(notebook, "%sing checkpoint other")
        said(notebook, "kept = 1")
        (store,) = data.iterdir()
        manifest = next(store.glob("manifests/*/mine.json"))
        manifest.write_bytes(manifest.read_bytes().replace(b'"mine"', b'"min3"', 1))
        for chunk in store.glob("chunks/*/*"):
            raw = bytearray(chunk.read_bytes())
            raw[-1 - raw[::-1].index(next(filter(None, raw[::-1])))] ^= 1  # the last byte but zeros
            chunk.write_bytes(raw)
        for name, why in (
            ("none", "no checkpoint 'none'"),
            ("../mine", "no checkpoint"),
            ("mine", "damaged"),
            ("other", "damaged"),
        ):
            ran = notebook.run(f"%sing restore {name}")
            assert why in ran.stderr, name
            assert ran.stderr.count("\n") == 1
        assert said(notebook, "print(kept, len(losses))") == "1 7"
        assert "cannot be the name" in notebook.run("%sing checkpoint ../up").stderr
    names = {each["name"]: each for each in listed()}
    assert "damaged" in names["mine"]["problem"]


@pytest.mark.parametrize("victim", ["kernel", "worker", "agent"])
def test_a_checkpoint_is_atomic(victim: str, data: Path) -> None:
    with kernel() as notebook:
        notebook.run(NOTEBOOK)
        notebook.run("weights = torch.rand(16 << 20, device='cuda'); torch.cuda.synchronize()")
        (session,) = sessions()
        pids = {
            "kernel": existing(session["kernel_pid"]),
            "worker": existing(session["worker_pid"]),
            "agent": agent_pid(),
        }
        cell = notebook.begin("%sing checkpoint mine")
        wait_until(lambda: list(data.glob("*/chunks/*/*")) or list(data.glob("*/tmp/*")))
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: not lives(pids[victim]))
        ran = notebook.finish(cell) if victim == "agent" else None
    found = listed()
    if ran is not None:  # and the notebook's output names it
        told = ran.stdout if found else ran.stderr
        assert ("Saved mine" if found else NOT_SAVED) in told, ran
    if found:
        with kernel() as notebook:
            assert said(notebook, "%sing restore mine").startswith("Restored ")
            assert said(notebook, "print(weights.numel(), len(losses))") == f"{16 << 20} 7"


def test_a_notebook_continues_while_it_is_saved(tmp_path: Path) -> None:
    """The checkpoint is of one moment, though the notebook changes its tensors meanwhile."""
    with kernel() as notebook:
        notebook.run(
            "import torch\nparts = [torch.zeros(8 << 20, device='cuda') for _ in range(8)]\n"
            "def step():\n    for part in parts: part.add_(1)\n    parts[0][0].item()"
        )
        (session,) = sessions()
        command = [sys.executable, "-m", "jupyter_sing.cli", "checkpoint", session["id"]]
        with subprocess.Popen([*command, "--name", "mine"], stdout=subprocess.PIPE) as asking:
            while asking.poll() is None:
                said(notebook, "step()")
        assert asking.returncode == 0
        said(notebook, "step()")
        said(notebook, "%sing restore mine")
        found = said(
            notebook, "print({p.min().item() for p in parts} | {p.max().item() for p in parts})"
        )
        assert found.count(",") == 0, "it is of several moments"
