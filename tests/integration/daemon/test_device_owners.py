"""Two daemons never own the same GPU. Plain files stand for those of GPUs in /dev."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import StatusReply, StatusRequest
from tests.conftest import stop_daemon
from tests.doubles.session.client import WAIT_SECONDS
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ROOT, ToyHost

DEVICES = "cpu:1GiB@1,cpu:1GiB@1"


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    found = [tmp_path / "nvidia0", tmp_path / "nvidia1", tmp_path / "nvidia2"]
    for each in found:
        each.touch(0o444)
    return [str(each) for each in found]


@contextmanager
def second_daemon(directory: Path, nodes: list[str]) -> Iterator[str]:
    """Start a daemon with another runtime directory; yield its report about its start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_SING_RUNTIME_DIR", str(directory))
        patch.setenv("JUPYTER_SING_DEVICES", DEVICES)
        patch.setenv("PYTHONPATH", str(ROOT))
        ready, write_end = os.pipe()
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.doubles.daemon.daemon", str(write_end)),
                json.dumps({"nodes": nodes}),
            ],
            pass_fds=(write_end,),
        ):
            os.close(write_end)
            said = os.read(ready, 1000).decode().strip()
            os.close(ready)
            yield said
            if said == "ready":
                stop_daemon(directory)


def opened_by(pid: int) -> set[str]:
    """Return the paths of a process's open files; concurrent changes may be missing."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(each))
    return found


@pytest.mark.slow
def test_a_second_daemon_leaves_the_gpus_of_the_first_alone_also_while_agents_die(
    toy_host: Callable[..., ToyHost],
    nodes: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = toy_host(DEVICES, nodes=nodes[:2])
    used = rf"GPU cpu:0 \(.*\) is used by the daemon of \w+ \(pid {host.agent_pid()}\): use that"
    with second_daemon(tmp_path / "second", nodes[1:]) as said:
        assert said == "ready"
        with agent_client.connect(start=False) as connection:
            reply = connection.expect(StatusReply, StatusRequest(), WAIT_SECONDS)
        assert [each["id"] for each in reply.devices] == ["cpu:1"]
        (sentence,) = reply.elsewhere
        assert re.match(used, sentence)
        for command in ("status", "devices"):
            assert commands.main([command]) == 0
            assert sentence in capsys.readouterr().out
    assert host.status().elsewhere == []
    client = host.client()
    host.work(client)
    for kill in (host.kill_agent, lambda: host.kill(host.supervisor_pid()), host.kill_agent):
        wait_until(lambda: nodes[0] in opened_by(host.supervisor_pid()))
        kill()
        with second_daemon(tmp_path / "third", nodes[:2]) as said:
            assert "GPU cpu:0" in said
            assert "GPU cpu:1" in said
    assert client.read() == client.state
    workers = host.children()
    assert not any(nodes[0] in opened_by(each) for each in workers)
    host.kill(host.agent_pid(), host.supervisor_pid())
    for directory in ("third", "fourth"):  # freed by a daemon that dies, and by one that exits
        with second_daemon(tmp_path / directory, nodes[:2]) as said:
            assert said == "ready"
