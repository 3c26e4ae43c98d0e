"""Real workers: killed at any moment, and in the largest number that a machine should support."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Resume, Suspend
from tests.doubles.waiting import wait_until
from tests.e2e.trainers import Program, agent_pid, program, status, verb
from tests.integration.conftest import lives

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def daemon_fds() -> int:
    with agent_client.connect(start=False) as agent:
        return len(os.listdir(f"/proc/{agent.daemon_pid}/fd"))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:2GiB@1,cpu:2GiB@1")


@pytest.mark.usefixtures("one_thread")
def test_ten_kills_and_a_suspension_change_no_loss() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    steps = 600
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        expected = plain.train(steps)
    with program(0, proxied=True) as proxied:
        assert proxied.answer() == ["ready"]
        killed: set[int] = set()
        done = threading.Event()

        def kill() -> None:
            while len(killed) < 10 and not done.wait(chance.uniform(0, 0.3)):
                (session,) = status().sessions
                worker = session["worker_pid"]
                if worker is None or worker in killed:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                    killed.add(worker)
                if len(killed) == 5:
                    assert verb(Suspend(proxied.session))["worker_pid"] is None
                    assert verb(Resume(proxied.session))["worker_pid"] is not None

        killer = threading.Thread(target=kill)
        killer.start()
        got: list[str] = []
        while len(killed) < 10 or len(got) < steps:
            got += proxied.train(20)
        done.set()
        killer.join()
    assert len(killed) == 10
    if len(got) > steps:
        with program(0, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            expected = plain.train(len(got))
    assert got == expected, f"seed {seed}"


@pytest.mark.usefixtures("one_thread")
def test_deaths_of_the_agent_change_no_loss() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    steps, deaths = 400, 4
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        expected = plain.train(steps)
    with program(0, proxied=True) as proxied:
        assert proxied.answer() == ["ready"]
        killed: list[int] = []
        done = threading.Event()

        def ended(pid: int) -> bool:
            return not lives(pid)

        def kill() -> None:
            while len(killed) < deaths and not done.wait(chance.uniform(0, 2.0)):
                agent = agent_pid()
                os.kill(agent, signal.SIGKILL)
                killed.append(agent)
                wait_until(partial(ended, agent))
                if len(killed) == 2:
                    assert verb(Suspend(proxied.session))["worker_pid"] is None
                    os.kill(agent_pid(), signal.SIGKILL)
                    assert status().sessions[0]["state"] == "suspended"
                    assert verb(Resume(proxied.session))["worker_pid"] is not None

        killer = threading.Thread(target=kill)
        killer.start()
        got: list[str] = []
        while killer.is_alive() or len(got) < steps:
            got += proxied.train(20)
        done.set()
        killer.join()
    assert len(set(killed)) == deaths
    if len(got) > steps:
        with program(0, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            expected = plain.train(len(got))
    assert got == expected, f"seed {seed}"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "count",
    [8, pytest.param(64, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])],
)
def test_many_sessions_are_resident_suspended_and_resumed_without_a_leak(count: int) -> None:
    at_once = 4
    with agent_client.connect():  # the daemon and, by the first program, the zygote are there
        pass
    with program(0, proxied=True) as first:
        assert first.answer() == ["ready"]
        first.train(1)
    wait_until(lambda: not status().sessions)
    fds = daemon_fds()
    with program(0, proxied=False) as plain:
        assert plain.answer() == ["ready"]
        expected = [plain.train(3) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        programs: list[Program] = []
        for begin in range(0, count, at_once):
            batch = [
                stack.enter_context(program(0, proxied=True))
                for _ in range(min(at_once, count - begin))
            ]
            for each in batch:
                assert each.answer() == ["ready"], begin
            programs += batch
        for each in programs:
            each.ask(3)
        assert [each.answer() for each in programs] == [expected[0]] * count
        sessions = status().sessions
        workers = {pid for each in sessions if (pid := each["worker_pid"]) is not None}
        assert len(workers) == count
        for each in programs:
            suspended = verb(Suspend(each.session))
            assert (suspended["state"], suspended["memory"]) == ("suspended", 0)
        assert sum(each["memory_used"] for each in status().devices) == 0
        assert not any(lives(worker) for worker in workers)
        for each in programs:
            verb(Resume(each.session))
        for each in programs:
            each.ask(3)
        assert [each.answer() for each in programs] == [expected[1]] * count
        assert len({each["worker_pid"] for each in status().sessions} - {None}) == count
    wait_until(lambda: not status().sessions)
    wait_until(lambda: daemon_fds() <= fds)
