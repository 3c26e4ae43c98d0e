"""A notebook that reads no result is ahead of its device at most as far as CUDA would let it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common.protocol import Left
from kernelproxy.common.shared_memory import SessionMemory
from tests.doubles.daemon.agent import LOG_BYTES, OneKernelAgent, wake
from tests.doubles.daemon.zygote import HEADER
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.session.member import Process, running
from tests.doubles.waiting import wait_until

#: As in native/client/log/pace.h, with the records that are written until its next check.
AHEAD_MAX = 1024 + 128
MANY = 4 * AHEAD_MAX  # this agent's log has room for at most twice as many


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[OneKernelAgent]:
    made = OneKernelAgent(tmp_path / "agent.sock")
    yield made
    made.close()


@pytest.fixture
def process(tmp_path: Path, agent: OneKernelAgent) -> Iterator[Process]:
    agent.open("first")
    with running(Process(tmp_path), agent) as started:
        assert (started.ask("grow 10"), started.ask("sync")) == ("grown", "done")
        yield started


def ahead(memory: SessionMemory) -> int:
    """Return the number of records that were not executed."""
    at, count = memory.worker.consumed, 0
    while at < memory.client.head:
        at += HEADER.unpack(os.pread(memory.fds[0], HEADER.size, at % LOG_BYTES))[0]
        count += 1
    return count


def held_up(agent: OneKernelAgent, process: Process) -> SessionMemory:
    """Let the process run ahead of a worker that executes nothing, until it waits."""
    memory = agent.sessions["first"]
    agent.workers["first"].gate.clear()
    process.tell(f"grow {MANY}")
    wait_until(lambda: memory.client.progress_wanted > memory.worker.consumed)
    return memory


def test_a_full_log_waits_for_the_worker(agent: OneKernelAgent, process: Process) -> None:
    memory = held_up(agent, process)
    # Some are executed by then: a closed gate takes effect only at the worker's next check.
    assert AHEAD_MAX / 2 < ahead(memory) <= AHEAD_MAX
    agent.workers["first"].gate.set()
    assert process.answer() == "grown"
    assert process.ask("sync") == "done"
    assert agent.workers["first"].records > MANY


def test_an_interrupt_finds_it_at_once_and_leaves_little_to_do(
    agent: OneKernelAgent, process: Process
) -> None:
    memory = held_up(agent, process)
    os.kill(process.pid, signal.SIGINT)
    assert 0 < int(process.answer()) <= AHEAD_MAX
    assert ahead(memory) <= AHEAD_MAX
    agent.workers["first"].gate.set()
    assert (process.ask("sync"), process.ask("grow 10"), process.ask("sync")) == (
        "done", "grown", "done",
    )  # fmt: skip


def test_a_waiting_client_can_detach_and_reattach(agent: OneKernelAgent, process: Process) -> None:
    memory = held_up(agent, process)
    said = agent.leave()
    assert isinstance(said, Left), said
    head = memory.client.head
    agent.workers["first"].gate.set()
    wait_until(lambda: agent.drained("first"))
    wake(process.pid, said.wake_fd, restored=False, session="first")
    assert agent.hellos.get(timeout=WAIT_SECONDS).session == "first"
    assert process.answer() == "grown"
    assert process.ask("sync") == "done"
    assert memory.client.head > head
