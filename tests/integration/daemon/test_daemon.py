"""The life cycle of the daemon: started once, when first needed, and exits when it is unused."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import (
    CloseSession,
    Prepare,
    StatusReply,
    StatusRequest,
    Stop,
    Suspend,
)
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ROOT, ToyHost, kill_at_once, lives, supervisor_of

StartHost = Callable[..., ToyHost]

ASK = (
    "from kernelproxy.common.ipc import agent_client as control\n"
    "from kernelproxy.common import protocol; import os\n"
    "with control.connect() as c: c.expect(protocol.StatusReply, protocol.StatusRequest(), 60);"
    "print(c.daemon_pid)"
)


def ask_in_a_process() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ASK],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def daemon_pid() -> int:
    with agent_client.connect(start=False) as connection:
        return connection.daemon_pid


def test_no_daemon_is_started_unless_requested(runtime_dir: Path) -> None:
    with pytest.raises(ControlError, match="No jupyter_sing daemon is running") as error:
        agent_client.connect(start=False)
    assert error.value.reason == "no-daemon"


def test_a_daemon_starts_at_first_need_and_is_detached(runtime_dir: Path) -> None:
    with agent_client.connect() as connection:
        reply = connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
    assert [each["id"] for each in reply.devices] == ["cpu:0", "cpu:1"]
    assert reply.sessions == []
    assert Path(f"/proc/{daemon_pid()}/stat").read_text().split()[3] != str(os.getpid())
    assert (runtime_dir / paths.SOCKET_NAME).stat().st_mode & 0o777 == 0o600


def test_simultaneous_starts_yield_one_daemon(runtime_dir: Path) -> None:
    processes = [ask_in_a_process() for _ in range(6)]
    pids = {process.communicate()[0] for process in processes}
    assert pids == {f"{daemon_pid()}\n"}


def test_a_daemon_without_sessions_exits_after_a_while(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_LINGER", "0.2")
    with agent_client.connect() as connection:
        left = os.pidfd_open(connection.daemon_pid)
    assert wait_for_end(left)
    assert not (runtime_dir / paths.SOCKET_NAME).exists()
    with agent_client.connect() as connection:  # and the next one starts
        connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)


def test_a_daemon_stays_while_a_client_is_connected(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_LINGER", "0.05")
    with agent_client.connect() as connection:
        pid = connection.daemon_pid
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
        assert connection.daemon_pid == pid


def test_connecting_to_one_that_leaves_all_the_time_always_works(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_LINGER", "0.001")
    pids = set[int]()
    chance = random.Random(1)
    rounds = 0
    while rounds < 40 or len(pids) <= 5:  # how often it has exited by then depends on timing
        rounds += 1
        with agent_client.connect() as connection:
            connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
            pids.add(connection.daemon_pid)
        time.sleep(chance.uniform(0, 0.02))  # meets the exiting agent at any moment


def test_stopping_waits_until_it_has_ended_its_sessions(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    family = host.children()
    assert len(family) == 2
    host.call(Stop())
    assert not any(lives(pid) for pid in family)
    with pytest.raises(RuntimeError, match="The daemon stopped"):
        client.read()


def test_after_a_stop_the_next_one_starts(runtime_dir: Path) -> None:
    for _ in range(3):
        with agent_client.connect() as connection:
            connection.call(Stop(), WAIT_SECONDS)


def test_a_killed_daemon_takes_workers_and_zygotes_along(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    fds = [os.pidfd_open(pid) for pid in host.children()]
    host.kill_agent()
    ended = [wait_for_end(fd) for fd in fds]
    assert all(ended)
    assert len(ended) == 2
    assert client.read() == client.state  # executed by another worker of the next agent


def test_a_socket_left_by_a_killed_daemon_is_no_obstacle(runtime_dir: Path) -> None:
    pid = daemon_pid_started()
    kill_at_once(pid, supervisor_of(pid))
    assert (runtime_dir / paths.SOCKET_NAME).exists()
    with agent_client.connect() as connection:
        connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
        assert connection.daemon_pid != pid


def test_a_killed_agent_without_sessions_is_replaced_and_leaves_later(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_LINGER", "0.5")
    with agent_client.connect() as connection:  # and as long as it is open, the agent does not exit
        pid = connection.daemon_pid
        kill_at_once(pid)
    with agent_client.connect(start=False) as connection:  # waits for the next one
        connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
        next_pid = daemon_pid()
        assert next_pid != pid
        agent_left, supervisor_left = (
            os.pidfd_open(next_pid),
            os.pidfd_open(supervisor_of(next_pid)),
        )
    assert wait_for_end(agent_left)
    assert wait_for_end(supervisor_left)
    assert not (runtime_dir / paths.SOCKET_NAME).exists()


def daemon_pid_started() -> int:
    """Start the daemon; return the pid of its agent."""
    with agent_client.connect() as connection:
        return connection.daemon_pid


def test_a_second_one_is_refused(runtime_dir: Path) -> None:
    with agent_client.connect():
        done = subprocess.run(
            [sys.executable, "-m", "kernelproxy.agent", "--foreground"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 1
    assert "runs in" in done.stderr


def test_a_foreground_daemon_ends_by_a_signal(runtime_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kernelproxy.agent", "--foreground"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stderr is not None
    while "ready" not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JUPYTER_SING_DEVICES", "tpu", "'tpu' is not a device"),
        ("JUPYTER_SING_IDLE_TIMEOUT", "soon", "not a number of seconds"),
    ],
)
def test_a_daemon_that_cannot_start_shows_the_reason(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ControlError, match=message) as error:
        agent_client.connect()
    assert error.value.reason == "no-daemon"


def test_a_kernel_never_starts_one(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SING_SOCKET", str(runtime_dir / paths.SOCKET_NAME))
    with pytest.raises(ControlError, match="restart the kernel"):
        agent_client.connect()


def test_an_unresponsive_daemon_times_out(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        with paths.short_path(runtime_dir / "mute.sock") as name:
            mute.bind(name)
        mute.listen()
        monkeypatch.setenv("SING_SOCKET", str(runtime_dir / "mute.sock"))
        with agent_client.connect() as connection:
            with pytest.raises(ControlError, match=r"within 0.05 seconds") as error:
                connection.call(StatusRequest(), 0.05)
            assert error.value.reason == "timeout"
            with pytest.raises(ControlError, match="is closed"):
                connection.call(StatusRequest(), 0.05)


def test_a_zygote_that_no_session_uses_ends(toy_host: StartHost) -> None:
    host = toy_host(linger=0.5, stays=True)
    client = host.client()
    host.work(client)
    host.call(Prepare("/nonexistent/python"))  # another environment, which has no zygote
    host.open("other")

    def family_of_two() -> list[int] | None:
        return found if len(found := host.children()) == 2 else None

    family = wait_until(family_of_two)
    (zygote,) = set(family) - {host.session(client)["worker_pid"]}
    client.close()
    host.clients.clear()
    wait_until(lambda: len(host.status().sessions) == 1)
    assert lives(zygote)  # the other session may need it
    host.call(CloseSession("other"))
    wait_until(lambda: not lives(zygote))


def wait_for_end(pidfd: int, seconds: float = WAIT_SECONDS) -> bool:
    """Wait for the end of a process, and close its pidfd."""
    try:
        return bool(select.select([pidfd], [], [], seconds)[0])
    finally:
        os.close(pidfd)


def test_deep_runtime_directories_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath(*["deeper"] * 25)
    monkeypatch.setenv("JUPYTER_SING_RUNTIME_DIR", str(deep))
    with agent_client.connect() as connection:
        assert connection.daemon_pid > 0
        connection.call(Stop(), WAIT_SECONDS)
    wait_until(lambda: not (deep / paths.SOCKET_NAME).exists())


def test_a_zygote_that_no_session_uses_ends_though_others_come_and_go(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(linger=0.5, stays=True)
    host.work(host.client())
    (used,) = set(host.children()) - {host.status().sessions[0]["worker_pid"]}
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))
    host.call(Prepare(str(tmp_path / "python")))
    known = {used, host.status().sessions[0]["worker_pid"]}
    (unused,) = wait_until(lambda: set(host.children()) - known)

    def gone_while_others_come() -> bool:
        host.call(CloseSession(host.open("comes")))
        return not lives(unused)

    wait_until(gone_while_others_come)
    assert lives(used)


def test_without_descriptors_the_agent_pauses_and_ends_no_session(
    toy_host: StartHost, tmp_path: Path
) -> None:
    log = tmp_path / "agent.log"
    log.touch()
    host = toy_host(log=str(log))
    works, comes_back = host.client("works"), host.client("comes back")
    for client in (works, comes_back):
        host.work(client)
    host.call(Suspend(comes_back.session, "You asked for it."))
    agent = host.agent_pid()
    limits = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, limits[1]))
    asking = ask_in_a_process()
    wait_until(lambda: "No connections are accepted" in log.read_text())
    works.add(2)
    assert works.read() == works.state
    with comes_back.cell():
        comes_back.add(2)
        wait_until(lambda: "Too many open files. Nothing is lost" in log.read_text())
        assert len(log.read_text()) < 20_000
        resource.prlimit(agent, resource.RLIMIT_NOFILE, limits)
        assert comes_back.read() == comes_back.state
    assert asking.communicate()[0] == f"{agent}\n"


def test_a_socket_whose_file_has_gone_is_made_anew_and_outlives_the_agent(
    toy_host: StartHost,
) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    agent, path = host.agent_pid(), paths.runtime_dir() / paths.SOCKET_NAME
    mode = path.stat().st_mode
    for _ in range(2):
        path.unlink()
        asking = [ask_in_a_process() for _ in range(2)]  # they may start a daemon, which exits
        assert {each.communicate()[0] for each in asking} == {f"{agent}\n"}
        assert path.stat().st_mode == mode
        host.kill_agent()
        client.add(2)
        assert client.read() == client.state
        agent = host.agent_pid()


def test_a_daemon_removes_and_repairs_its_own_socket_only(toy_host: StartHost) -> None:
    host = toy_host()
    directory = paths.runtime_dir()
    (directory / "agent.lock").unlink()  # another process may hold the lock now
    (directory / "agent.lock").touch()
    path = directory / paths.SOCKET_NAME
    ours = directory / "ours"
    path.rename(ours)
    path.touch()
    with agent_client.connect_now(start=False, path=ours) as connection:
        connection.call(Stop(), WAIT_SECONDS)
    assert host.process.wait(WAIT_SECONDS) == 0
    assert path.stat().st_size == 0


@pytest.mark.slow
def test_nothing_stays_of_sessions_that_have_closed(toy_host: StartHost, tmp_path: Path) -> None:
    path = tmp_path / "objects"
    host = toy_host("cpu:4GiB@1", linger=0.1, objects=str(path))
    kept = host.client("kept")
    host.work(kept)

    def objects() -> list[int]:
        path.unlink(missing_ok=True)
        os.kill(host.agent_pid(), signal.SIGUSR2)
        return json.loads(wait_until(lambda: path.exists() and path.read_text()))

    def after(count: int) -> int:
        """Return the number of objects after this many sessions were opened and closed."""
        clients = [host.client(f"{each}", key=f"{each}") for each in range(count)]
        for each in clients:
            host.work(each)
        assert objects()[0] == 1 + count
        for each in clients:
            each.close()
            host.call(CloseSession(each.session))
        # The next cleanup finds processes that have ended late.
        wait_until(lambda: host.call(Prepare(sys.executable)) and objects()[0] == 1)
        return objects()[1]

    after(2)
    before = after(4)
    assert after(16) < before + 400  # a session has some hundreds
    assert kept.read() == kept.state


def test_a_limit_on_file_sizes_is_named_in_the_error(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    host.work(client)
    agent = host.agent_pid()
    limits = resource.prlimit(agent, resource.RLIMIT_FSIZE)
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    with pytest.raises(ControlError, match=r"of 1.0 MiB at most: .*\(ulimit -f\)"):
        host.client("other")
    assert client.read() == client.state  # and an existing session continues
    resource.prlimit(agent, resource.RLIMIT_FSIZE, limits)
    other = host.client("other")
    host.work(other)
    assert other.read() == other.state
