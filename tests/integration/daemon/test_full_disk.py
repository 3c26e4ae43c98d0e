"""Deaths and requests while a disk is full: sessions continue, and errors name the full disk."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import Resume, Suspend
from tests.doubles.session.pids import existing
from tests.doubles.waiting import wait_until
from tests.integration.checkpoints.test_checkpoints import hand_over, host_state
from tests.integration.conftest import ToyHost
from tests.integration.daemon.test_supervisor import keeps

StartHost = Callable[..., ToyHost]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system for the daemon's runtime directory, or for its data."""
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    mounted: list[str] = []

    def mount_at(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(directory)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small file system cannot be mounted without privileges")
        mounted.append(str(directory))
        return directory

    yield mount_at
    for each in mounted:
        subprocess.run(["umount", "--lazy", each], check=True)


def fill(directory: Path) -> None:
    for size in (1 << 16, 1):
        with (directory / f"ballast {size}").open("wb", buffering=0) as ballast:
            while True:
                try:
                    ballast.write(b"x" * size)
                except OSError:
                    break


@pytest.mark.parametrize("name", ["runtime", "data"])
def test_whatever_dies_on_a_full_disk_nothing_is_lost(
    mount: Callable[[str], Path], toy_host: StartHost, name: str
) -> None:
    disk = mount(name)
    (disk / "agent.log").touch()
    host = toy_host(log=str(disk / "agent.log"), cold_after=0.1, idle_timeout=0)
    client = host.client()
    host.work(client)
    fill(disk)
    host.kill_worker(client)
    assert client.read() == client.state
    for _ in range(2):
        host.call(Suspend(client.session, "You asked for it."))
        host.call(Resume(client.session))
        host.kill_agent()
        client.add(2)
        assert client.read() == client.state
    host.kill(host.supervisor_pid())
    wait_until(lambda: keeps(host.supervisor_pid(), 1))
    host.kill_agent()
    other = host.client("other")
    host.work(other)
    host.kill(host.agent_pid(), existing(host.session(other)["worker_pid"]))
    for each in (client, other):
        each.add(3)
        assert each.read() == each.state


def test_a_write_to_a_full_disk_is_refused(
    mount: Callable[[str], Path], toy_host: StartHost
) -> None:
    disk = mount("data")
    host = toy_host(cold_after=0.1)
    client = host.client()
    host.work(client)
    fill(disk)
    content = b"x" * (8 << 20)
    with pytest.raises(ControlError, match=r"No space left on device.*; free some space"):
        hand_over(client.session, "one", host_state(0, content), content)
    host.call(Suspend(client.session, "You asked for it."))
    with client.cell():
        assert client.read() == client.state
    for each in disk.glob("ballast*"):
        each.unlink()
    host.call(Suspend(client.session, "You asked for it."))
    wait_until(lambda: host.session(client)["tier"] == "cold")
    with client.cell():
        assert client.read() == client.state
