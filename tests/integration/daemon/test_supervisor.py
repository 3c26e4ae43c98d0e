"""Sessions outlive the agent: it is killed at any moment, and results stay the same."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    CloseSession,
    Message,
    OpenSession,
    OpenSessionReply,
    Resume,
    StatusReply,
    StatusRequest,
    Suspend,
)
from tests.doubles.session.client import WAIT_SECONDS, ToyClient
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ROOT, ToyHost, from_outside, lives, run_state

MIB = 1 << 20
StartHost = Callable[..., ToyHost]


class InFlight:
    """A request that the agent has received, or will receive, but cannot answer: it is stopped."""

    def __init__(self, host: ToyHost, request: Message) -> None:
        self.host = host
        self.answer: Message | None = None
        self.agent = host.agent_pid()
        self._connection = agent_client.connect(start=False)
        os.kill(self.agent, signal.SIGSTOP)
        self._thread = threading.Thread(target=self._ask, args=(request,))
        self._thread.start()

    def _ask(self, request: Message) -> None:
        with self._connection:
            self.answer = self._connection.call(request, WAIT_SECONDS)

    def kill_agent(self) -> Any:
        """Kill the agent; return the answer of the next one."""
        self.host.kill(self.agent)
        self._thread.join()
        return self.answer


# -------------------------------------------------------------------- the agent alone


@pytest.mark.parametrize("moment", ["unused", "idle", "busy", "suspended", "held"])
def test_a_killed_agent_changes_no_result(toy_host: StartHost, moment: str) -> None:
    host = toy_host(idle_timeout=0.05 if moment == "suspended" else 0)
    client = host.client()
    agent = host.agent_pid()
    if moment != "unused":
        for number in range(100):
            client.add(number)
    if moment not in ("unused", "busy"):
        assert client.read() == client.state
    if moment == "held":
        host.call(Suspend(client.session, "You asked for it."))
    if moment == "suspended":
        wait_until(lambda: host.when(client, "suspended"))
    before: dict[str, Any] = {**host.session(client)}
    host.kill_agent()
    after: dict[str, Any] = {**host.session(client)}
    assert host.agent_pid() != agent
    same = ("id", "name", "owner", "kernel_id", "kernel_pid", "device", "log_head", "operators")
    assert [after[key] for key in same] == [before[key] for key in same]
    if moment in ("suspended", "held", "unused"):
        assert (after["state"], after["reason"]) == (before["state"], before["reason"])
    with client.cell():  # it is not suspended before this client was seen
        client.add(100)
        assert client.read() == client.state
        wait_until(lambda: host.session(client)["worker_pid"] not in (None, before["worker_pid"]))


@pytest.mark.slow
def test_five_kills_at_random_moments_change_no_result(toy_host: StartHost) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    host = toy_host("cpu:1GiB,cpu:1GiB", log_bytes=1 << 16, log_budget=1 << 14)
    clients = [host.client("first"), host.client("second")]
    done = threading.Event()

    def kill() -> None:
        for _ in range(5):
            if done.wait(chance.uniform(0, 1.5)):
                return
            host.kill_agent()

    def snapshots() -> int:
        return max(client.agent.snapshots for client in clients)

    def verb() -> None:
        with contextlib.suppress(ControlError):  # two agents died, one after the other
            host.call(chance.choice((Suspend, Resume))(chance.choice(clients).session))

    killer = threading.Thread(target=kill)
    killer.start()
    number = 0
    try:
        while killer.is_alive() or number < 4000 or snapshots() < 4:
            number += 1
            for client in clients:
                client.add(number)
                if chance.random() < 0.002:
                    assert client.read() == client.state, f"seed {seed}"
            if chance.random() < 0.0005:
                verb()
                time.sleep(chance.uniform(0, 0.1))
    finally:
        done.set()
        killer.join()
    for client in clients:
        host.call(Resume(client.session))
        assert client.read() == client.state, f"seed {seed}"


def scenario(host: ToyHost) -> None:
    """Do all that deposits state with the supervisor."""
    with agent_client.connect(start=False) as connection:
        request = OpenSession("moments", "", sys.executable)
        session = connection.expect(OpenSessionReply, request, WAIT_SECONDS).session
    client = ToyClient(session)
    host.clients.append(client)
    client.use(10 * MIB)
    for number in range(40):
        client.add(number)
    assert client.read() == client.state
    host.call(Suspend(session))
    for number in range(500):  # takes snapshots
        client.add(number)
    assert client.read() == client.state
    host.call(Suspend(session))
    host.call(Resume(session))
    assert client.want(100 * MIB)
    client.add(7)
    assert client.read() == client.state
    wait_until(lambda: host.session(client)["state"] in ("idle", "running"))
    host.call(CloseSession(session))
    wait_until(lambda: not host.status().sessions)


MOMENT_SETTINGS = {"log_bytes": 1 << 14, "log_budget": 1 << 12}


@pytest.mark.slow
def test_the_agent_may_die_between_any_two_steps(toy_host: StartHost, tmp_path: Path) -> None:
    moments = tmp_path / "moments"
    host = toy_host(moments=str(moments), **MOMENT_SETTINGS)
    scenario(host)
    count = int(moments.read_text())
    host.end()
    died = 0
    while died < 10:
        die_at = random.randrange(3, count - 4)  # the first two are before it is ready
        host = toy_host(die_at=die_at, **MOMENT_SETTINGS)
        host.was_killed = True
        scenario(host)
        if host.process.poll() is None:  # with fewer snapshots there are fewer moments
            count = die_at + 4
            host.kill_agent()
        else:
            died += 1
        host.end()


@pytest.mark.parametrize("verb", [Suspend, Resume])
def test_a_verb_in_flight_is_carried_out_by_the_next_agent(
    toy_host: StartHost, tmp_path: Path, verb: type[Suspend | Resume]
) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    if verb is Resume:
        host.call(Suspend(client.session))
    asked = InFlight(host, verb(client.session)).kill_agent()
    assert asked.session["tier"] == ("parked" if verb is Suspend else "resident")
    client.add(2)
    assert client.read() == client.state


def test_a_suspension_that_waits_for_an_operator_is_made_again(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.append(f"wait {tmp_path / 'done'}")
    client.add(2)
    worker = wait_until(lambda: host.session(client)["worker_pid"])
    suspending = threading.Thread(target=from_outside, args=(Suspend(client.session),))
    suspending.start()
    wait_until(lambda: not client.worker.gate_open)  # the suspension has begun
    host.kill_agent()
    (tmp_path / "done").touch()
    suspending.join()
    assert not lives(worker)
    assert host.session(client)["state"] == "suspended"
    host.call(Resume(client.session))
    assert client.read() == client.state


def test_an_opened_session_is_not_opened_twice(toy_host: StartHost) -> None:
    host = toy_host()
    request = OpenSession("once", "k", sys.executable)
    first = host.call(request)
    assert host.call(request) == first
    asked = InFlight(host, OpenSession("in flight", "k", sys.executable)).kill_agent()
    assert {each["id"] for each in host.status().sessions} == {first.session, asked.session}
    for session in (first.session, asked.session):
        with ToyClient(session) as client:
            client.add(1)
            assert client.read() == client.state


def test_sessions_that_waited_for_memory_keep_their_places(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB")
    first, second, third = (host.client(name) for name in ("first", "second", "third"))
    for client in (second, third, first):
        host.work(client, 200 * MIB)
    with first.cell():
        for client in (third, second):
            client.add(2)
            wait_until(partial(host.when, client, "queued"))
        host.kill_agent()
        first.add(2)
        assert first.read() == first.state
        wait_until(lambda: "You are next" in host.session(third)["reason"])
        wait_until(lambda: "Place 2 in the queue" in host.session(second)["reason"])
        wait_until(lambda: host.session(first)["memory"] == 200 * MIB)
    for client in (third, second):
        assert client.read() == client.state


def test_idle_sessions_are_suspended_by_the_next_agent(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0.5)
    client = host.client()
    client.add(1)
    client.read()
    host.kill_agent()
    wait_until(lambda: host.when(client, "suspended"))
    client.add(2)
    assert client.read() == client.state


def test_a_skipped_call_stays_skipped(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.append("die")
    client.add(2)
    assert client.read() == client.state
    host.kill_agent()
    client.add(3)
    assert client.read() == client.state


def test_a_failed_session_stays_failed(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.append("corrupt")
    with pytest.raises(RuntimeError, match="a bad record"):
        client.read()
    host.kill_agent()
    assert host.session(client)["state"] == "failed"
    with pytest.raises(RuntimeError, match="a bad record"):
        client.read()


def test_a_stopped_worker_of_the_dead_agent_is_ended_before_the_next_one(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    worker = existing(host.session(client)["worker_pid"])
    os.kill(worker, signal.SIGSTOP)
    client.add(2)
    host.kill_agent()
    assert client.read() == client.state
    assert not lives(worker)


def test_a_kernel_that_ends_meanwhile_takes_its_session_along(toy_host: StartHost) -> None:
    host = toy_host()
    session = host.open()
    program = (
        "import sys; from tests.doubles.session.client import ToyClient\n"
        f"client = ToyClient({session!r}); client.add(1); client.read()\n"
        "print('attached', flush=True); sys.stdin.read()"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == b"attached\n"
    agent = host.agent_pid()
    os.kill(agent, signal.SIGSTOP)
    kernel.kill()
    kernel.communicate()
    host.kill(agent)
    wait_until(lambda: not host.status().sessions)


def test_another_process_cannot_take_the_kernels_place(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.kill_agent()
    program = f"from tests.doubles.session.client import ToyClient; ToyClient({client.session!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "belongs to another process" in done.stderr
    client.add(1)
    assert client.read() == client.state


def test_a_session_whose_device_is_gone_reports_it(toy_host: StartHost) -> None:
    host = toy_host("cpu:1GiB,cpu:1GiB", devices_after="cpu:1GiB")
    stays, goes = host.client("stays", device="cpu:0"), host.client("goes", device="cpu:1")
    for client in (stays, goes):
        host.work(client)
    host.kill_agent()
    assert [each["name"] for each in host.status().sessions] == ["stays"]
    goes.add(2)
    with pytest.raises(RuntimeError, match="did not outlive its daemon: the device cpu:1 is gone"):
        goes.read()
    stays.add(2)
    assert stays.read() == stays.state


# -------------------------------------------------------------------- the supervisor


@pytest.mark.slow
def test_a_killed_supervisor_is_replaced_and_knows_everything(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    for _ in range(3):
        host.kill(host.supervisor_pid())
        wait_until(lambda: keeps(host.supervisor_pid(), 1))
        client.add(2)
        assert client.read() == client.state
        host.kill_agent()
        client.add(3)
        assert client.read() == client.state


def keeps(supervisor: int, count: int) -> bool:
    """True if the supervisor has this many sessions by now."""
    found = 0
    for each in Path(f"/proc/{supervisor}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += "sing-log" in os.readlink(each)
    return found == count


@pytest.mark.slow
def test_a_hung_supervisor_is_replaced(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    supervisor = host.supervisor_pid()
    os.kill(supervisor, signal.SIGSTOP)
    sessions = []
    while lives(supervisor):  # deposits accumulate, as it does not read
        sessions.append(host.open())
        assert len(sessions) < 1000
    wait_until(lambda: keeps(host.supervisor_pid(), len(sessions) + 1))
    host.kill_agent()
    assert len(host.status().sessions) == len(sessions) + 1
    client.add(2)
    assert client.read() == client.state


def test_killing_both_ends_the_sessions_and_leaves_nothing(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    family = host.children()
    host.kill(host.agent_pid(), host.supervisor_pid())
    assert client.gone.wait(WAIT_SECONDS)
    wait_until(lambda: not any(lives(pid) for pid in family))  # until then they still execute
    with pytest.raises(RuntimeError, match="the daemon is gone"):
        client.read()
    with pytest.raises(ControlError, match="No jupyter_sing daemon is running"):
        agent_client.connect(start=False)
    with agent_client.connect() as connection:  # what they left does not prevent the next ones
        assert connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS).sessions == []


@pytest.mark.slow
@pytest.mark.alone  # a command has to start within the pause of two seconds
def test_an_agent_that_dies_again_and_again_is_started_again(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    for _ in range(6):  # the last one after a pause of 1 s
        host.kill_agent()
    agent = host.agent_pid()
    host.kill(agent)  # a pause of 2 s
    command = [sys.executable, "-m", "jupyter_sing.cli", "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert client.session[:6] in done.stdout
    assert done.stderr.startswith("The jupyter_sing daemon died 7 times in a row; it starts again")
    assert not [*paths.runtime_dir().glob("*.restart")]
    client.add(2)
    assert client.read() == client.state


def test_without_anywhere_to_write_its_log_the_next_agent_starts(toy_host: StartHost) -> None:
    host = toy_host(log="/dev/full")
    client = host.client()
    host.work(client)
    for _ in range(3):
        host.kill_agent()
        client.add(2)
        assert client.read() == client.state


def test_a_zygote_that_is_killed_before_it_is_ready_is_replaced(toy_host: StartHost) -> None:
    # The zygote kills itself twice, as another process might.
    once = (
        "import os, sys, runpy; path = os.environ['TOY_KILLS']; left = int(open(path).read())\n"
        "open(path, 'w').write(str(left - 1))\n"
        "if left > 0: os.kill(os.getpid(), 9)\n"
        "runpy.run_module('tests.doubles.daemon.zygote', run_name='__main__', alter_sys=True)"
    )
    kills = paths.runtime_dir().parent / "kills"
    kills.write_text("2")
    host = toy_host(zygote_command=["-c", once], kills=str(kills))
    client = host.client()
    client.add(1)
    assert client.read() == client.state
    assert kills.read_text() == "-1"


def test_no_second_daemon_starts_while_there_is_no_agent(toy_host: StartHost) -> None:
    host = toy_host()
    supervisor, agent = host.supervisor_pid(), host.agent_pid()
    os.kill(supervisor, signal.SIGSTOP)
    host.kill(agent)
    ask = (
        "from kernelproxy.common.ipc import agent_client as control\n"
        "from kernelproxy.common import protocol\n"
        "with control.connect() as c:\n"
        "  c.expect(protocol.StatusReply, protocol.StatusRequest(), 60)\n"
        "with control.connect() as c: print(c.daemon_pid)"
    )
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ask],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(3)
    ]
    refused = subprocess.run(
        [sys.executable, "-m", "kernelproxy.agent", "--foreground"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "A daemon runs in" in refused.stderr
    os.kill(supervisor, signal.SIGCONT)
    assert {each.communicate()[0] for each in asking} == {f"{host.agent_pid()}\n"}
    assert host.supervisor_pid() == supervisor


@pytest.mark.slow
def test_ended_sessions_leave_nothing_with_the_supervisor(toy_host: StartHost) -> None:
    host = toy_host()
    with ToyClient(host.open()) as client:
        host.work(client)
    wait_until(lambda: not host.status().sessions)

    def held() -> list[int]:
        pids = (host.supervisor_pid(), host.agent_pid())
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

    host.kill_agent()
    before = held()
    clients = [host.client() for _ in range(10)]
    for client in clients:
        host.work(client)
        host.call(Suspend(client.session))
    host.kill_agent()
    for client in clients:
        client.add(2)
        assert client.read() == client.state
        client.close()
    host.clients.clear()
    wait_until(lambda: not host.status().sessions)
    wait_until(lambda: len(host.children()) == 1)
    wait_until(lambda: sum(held()) <= sum(before) + 1)  # the zygote's connection


@pytest.mark.parametrize("spare", [None, 0, 2, 3])
def test_a_supervisor_without_descriptors_keeps_all_sessions(
    toy_host: StartHost, tmp_path: Path, spare: int | None
) -> None:
    log = tmp_path / "agent.log"
    log.touch()
    host = toy_host(log=str(log))
    client = host.client()
    host.work(client)
    supervisor, agent = host.supervisor_pid(), host.agent_pid()
    limits = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    held = len(os.listdir(f"/proc/{supervisor}/fd")) - 2  # the agent's process and connection end
    most = 3 if spare is None else held + spare
    # What the agent sends now would be lost: it stops, and the supervisor has received everything.
    os.kill(agent, signal.SIGSTOP)
    wait_until(lambda: (run_state(agent), run_state(supervisor)) == ("T", "S"))
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (most, limits[1]))
    host.kill(agent)
    wait_until(lambda: "Too many open files" in log.read_text())
    assert lives(supervisor)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, limits)
    assert client.read() == client.state
