"""Notebooks whose process is saved, under the real agent and CRIU: as if nothing had happened."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kernelproxy.agent.process.hibernation import REASON
from kernelproxy.common.errors import ProcessError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import CheckpointsReply, CheckpointsRequest
from kernelproxy.criu import mode_probe as forms
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import SECONDS_MAX, Kernel, kernel, sessions, wait_for_session
from tests.e2e.trainers import agent_pid
from tests.integration.conftest import kill_at_once, supervisor_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NOTEBOOK = """\
import itertools, random, threading, time
import torch
torch.manual_seed(3); random.seed(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
net[2].weight = net[0].weight  # tied
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
batch = torch.randn(32, 64, device='cuda')
def train(steps):
    losses = []
    for _ in range(steps):
        noise = torch.rand(32, 64, device='cuda') * random.random()
        loss = torch.nn.functional.dropout(net(batch + noise), 0.1).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item().hex())
    return losses
train(5)
numbers = (n * n for n in itertools.count())
_ = [next(numbers) for _ in range(3)]
lock = threading.Lock(); lock.acquire()
ticks = 0
def tick():
    global ticks
    while True:
        time.sleep(0.01); ticks += 1
threading.Thread(target=tick, daemon=True).start()
notes = open("notes.txt", "w+"); notes.write("first "); notes.flush()
"""
GO_ON = "print(*train(10))"
STATE = """\
before = ticks
deadline = time.monotonic() + 60
while ticks == before and time.monotonic() < deadline: time.sleep(0.01)
print(next(numbers), lock.locked(), ticks > before, notes.tell(), net[2].weight is net[0].weight)
"""


@pytest.fixture(autouse=True)
def _form(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv(forms.VARIABLE, forms.find_criu())
        # The daemon then knows the result: on a slow machine its probe takes longer than kernels
        # wait.
        monkeypatch.setattr(forms, "STEP_SECONDS", SECONDS_MAX)
        forms.find(runtime_dir)
    except ProcessError as error:
        if forms.VARIABLE in os.environ:
            raise
        pytest.skip(str(error))
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
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


def restore(notebook: Kernel, name: str) -> None:
    assert "with the process" in ran(notebook, f"%sing restore {name}")


def forms_of(name: str) -> list[str]:
    with connect(start=False) as control:
        reply = control.expect(CheckpointsReply, CheckpointsRequest(), 60.0)
    (found,) = (each["forms"] for each in reply.checkpoints if each["name"] == name)
    return list(found)


def test_the_process_comes_back_after_everything_has_died(kernels: ExitStack) -> None:
    first = kernels.enter_context(kernel())
    ran(first, NOTEBOOK)
    ran(first, "%sing checkpoint one")
    assert forms_of("one") == ["namespace", "process"]
    expected = ran(first, GO_ON)
    state = ran(first, STATE)
    agent = agent_pid()
    pids = [pid for each in sessions() for pid in (each["kernel_pid"], each["worker_pid"]) if pid]
    kill_at_once(agent, supervisor_of(agent), *pids)
    second = kernels.enter_context(kernel())
    for _ in range(3):
        restore(second, "one")
        assert ran(second, GO_ON) == expected
        assert ran(second, STATE) == state
    third = kernels.enter_context(kernel())
    restore(third, "one")
    ran(second, "del net, optimizer")
    assert ran(third, GO_ON) == expected


@pytest.mark.parametrize("device", [True, False])
def test_an_unused_kernel_hibernates_and_answers_its_next_cell(
    kernels: ExitStack, monkeypatch: pytest.MonkeyPatch, device: bool
) -> None:
    monkeypatch.setenv("JUPYTER_SING_HIBERNATE_TIMEOUT", "3")
    notebook = kernels.enter_context(kernel())
    setup = "import torch; held = torch.ones(1 << 20, device='cuda')" if device else "held = [1]"
    ran(notebook, f"{setup}\nnumbers = iter(range(9)); print(next(numbers))")
    for number in range(1, 4):
        found = wait_for_session(lambda each: each["reason"] == REASON)
        assert (found["kernel_pid"], found["tier"]) == (None, "cold")
        said = (
            "print(next(numbers), int(sum(held)))"
            if not device
            else ("print(next(numbers), int(held.sum()))")
        )
        assert ran(notebook, said) == f"{number} {1 << 20 if device else 1}\n"
    images = Path(os.environ["JUPYTER_SING_DATA_DIR"]) / "processes"
    notebook.manager.shutdown_kernel()
    wait_until(lambda: not [path for path in images.glob("*/*") if path.is_dir()])


def test_many_detach_and_reattach_in_any_order(
    kernels: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_HIBERNATE_TIMEOUT", "2")
    notebooks = [kernels.enter_context(kernel()) for _ in range(20)]
    for number, notebook in enumerate(notebooks):
        ran(notebook, f"numbers = iter(range({number}, 99))")
    pick = random.Random(7)
    for turn in range(2):
        wait_until(lambda: all(each["reason"] == REASON for each in sessions()), 600.0)
        order = pick.sample(range(len(notebooks)), len(notebooks))
        asked = {number: notebooks[number].begin("print(next(numbers))") for number in order}
        for number in pick.sample(order, len(order)):
            said = notebooks[number].finish(asked[number])
            assert (said.error_text, said.stdout) == ("", f"{number + turn}\n")
