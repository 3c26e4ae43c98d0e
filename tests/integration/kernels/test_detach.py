"""A process that detaches from its session and reattaches: nothing is lost or left open."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.common.protocol import Error, Left
from kernelproxy.criu import criu
from kernelproxy.criu.mode_probe import find_criu
from kernelproxy.criu.sandbox import Form
from tests.conftest import RunProgram
from tests.doubles.daemon.agent import OneKernelAgent, wake
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.session.member import Process, running
from tests.doubles.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "programs" / "training"


@pytest.mark.slow
def test_training_continues_bit_for_bit(runtime_dir: Path, run_program: RunProgram) -> None:
    program = PROGRAMS / "leaving.py"
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JUPYTER_SING_DEVICES": "cpu:1GiB@1"}
    plain = run_program(program, "--device", "cpu", proxied=False, env=env)
    proxied = run_program(program, "--device", "cuda", "--leave", proxied=True, env=env)
    losses = json.loads(plain.stdout)
    assert all(len(set(each)) == 10 for each in losses)
    assert json.loads(proxied.stdout) == losses


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneKernelAgent]:
    made = OneKernelAgent(tmp_path / "agent.sock")
    yield made
    made.close()


@pytest.fixture(params=["root", "user"] if os.geteuid() == 0 else ["user"])
def form(request: pytest.FixtureRequest) -> Form:
    """Each form in which this user can save processes."""
    try:
        return Form(request.param, find_criu())
    except ProcessError as error:
        pytest.skip(str(error))


@pytest.fixture
def process(tmp_path: Path, agent: OneKernelAgent) -> Iterator[Process]:
    agent.open("first")
    with running(Process(tmp_path), agent) as started:
        yield started


def left(agent: OneKernelAgent) -> Left:
    said = agent.leave()
    assert isinstance(said, Left), said
    return said


def test_nothing_stays_open_and_all_continues(agent: OneKernelAgent, process: Process) -> None:
    assert process.ask("grow 100") == "grown"
    assert process.ask("sync") == "done"
    assert process.open_to_the_outside()
    said = left(agent)
    assert process.open_to_the_outside() == []
    wait_until(lambda: agent.drained("first"))
    head, records = agent.sessions["first"].client.head, agent.workers["first"].records
    process.tell("grow 100")  # waits until it has reattached
    process.tell("sync")
    assert (agent.sessions["first"].client.head, agent.workers["first"].records) == (head, records)
    wake(process.pid, said.wake_fd, restored=False, session="first")
    assert agent.hellos.get(timeout=WAIT_SECONDS).session == "first"
    assert (process.answer(), process.answer()) == ("grown", "done")
    assert agent.workers["first"].records >= records + 101
    # Again, while another thread uses the device.
    assert process.ask("begin") == "begun"
    for _ in range(5):
        said = left(agent)
        assert process.open_to_the_outside() == []
        wake(process.pid, said.wake_fd, restored=False, session="first")
        agent.hellos.get(timeout=WAIT_SECONDS)
    process.tell("end")
    assert int(process.answer()) > 0
    assert process.ask("sync") == "done"


def test_a_detached_kernel_joins_another_session_at_the_same_addresses(
    agent: OneKernelAgent, process: Process
) -> None:
    assert process.ask("begin") == "begun"
    said = left(agent)
    wait_until(lambda: agent.drained("first"))
    agent.open_copy("second", of="first")
    before = agent.sessions["first"].client.head
    wake(process.pid, said.wake_fd, restored=True, session="second")
    assert agent.hellos.get(timeout=WAIT_SECONDS).session == "second"
    process.tell("end")
    assert int(process.answer()) > 0
    assert process.ask("sync") == "done"
    client = agent.sessions["second"].client
    assert client.head > before == agent.sessions["first"].client.head
    assert client.memory_used > 0


def test_a_session_at_other_addresses_is_refused_in_one_sentence(
    agent: OneKernelAgent, process: Process
) -> None:
    process.tell("begin")
    assert process.answer() == "begun"
    said = left(agent)
    process.tell("sync")
    wait_until(lambda: agent.drained("first"))
    agent.open_copy("second", of="first", head=0)
    wake(process.pid, said.wake_fd, restored=True, session="second")
    assert "the device daemon of jupyter_sing is gone" in process.answer()


def test_a_kernel_stays_attached_while_a_thread_waits_for_the_device(
    agent: OneKernelAgent, tmp_path: Path
) -> None:
    agent.open("first")
    with running(Process(tmp_path, seconds=0.1), agent) as process:
        assert process.ask("sync") == "done"
        agent.workers["first"].gate.clear()
        head = agent.sessions["first"].client.head
        process.tell("sync")
        wait_until(lambda: agent.sessions["first"].client.head > head)
        said = agent.leave()
        assert isinstance(said, Error)
        assert said.reason == "busy"
        assert "a thread of the notebook waits for the device" in said.message
        agent.workers["first"].gate.set()
        assert process.answer() == "done"
        assert process.ask("grow 10") == "grown"
        assert process.ask("sync") == "done"
        # Now no thread waits; but the time that detaching takes counts, too.
        left = wait_until(lambda: found if isinstance(found := agent.leave(), Left) else None)
        wake(process.pid, left.wake_fd, restored=False, session="first")
        assert process.ask("sync") == "done"


@pytest.mark.slow
def test_a_kernel_continues_in_a_process_restored_from_its_images(
    form: Form, agent: OneKernelAgent, tmp_path: Path
) -> None:
    agent.open("first")
    images = tmp_path / "images"
    with running(Process(tmp_path, form=form), agent) as process:
        assert process.ask("grow 100") == "grown"
        assert process.ask("begin") == "begun"
        said = left(agent)
        criu.dump(form, process.pid, images, wake_fd=said.wake_fd, leave_running=False)
        process.popen.wait(WAIT_SECONDS)
        wait_until(lambda: agent.drained("first"))
        for name in ("second", "third"):
            agent.open_copy(name, of="first")
            restored = criu.restore(form, images, ports=None)
            process.popen, process.pid = restored.process, restored.pid
            wake(process.pid, said.wake_fd, restored=True, session=name)
            assert agent.hellos.get(timeout=WAIT_SECONDS).session == name
            process.tell("end")
            assert int(process.answer()) > 0
            assert (process.ask("grow 10"), process.ask("sync")) == ("grown", "done")
            client = agent.sessions[name].client
            assert client.head > agent.sessions["first"].client.head
            # By the clock of this host, whatever the clock of the process is.
            assert abs(client.cell_changed_ns - time.monotonic_ns()) < WAIT_SECONDS * 1e9
            again = left(agent)
            assert process.open_to_the_outside() == []
            wake(process.pid, again.wake_fd, restored=False, session=name)
            agent.hellos.get(timeout=WAIT_SECONDS)
            assert process.ask("sync") == "done"
            process.popen.kill()
            process.popen.wait()
            assert agent.said.get(timeout=WAIT_SECONDS) is None  # it disconnects
