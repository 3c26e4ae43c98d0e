"""A GPU has one owner: the holder of the lock on its file. Plain files stand for those in /dev."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_sing.cli import doctor
from kernelproxy.common.errors import DeviceError
from kernelproxy.devices import Device, DeviceKind
from kernelproxy.devices.locks import Claim, claim, owner

HOLD = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1])\n"
    "fcntl.flock(file, fcntl.LOCK_EX)\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def gpus(tmp_path: Path) -> list[Device]:
    found = []
    for index in range(2):
        node = tmp_path / f"nvidia{index}"
        node.touch(0o444)
        name = f"cuda:{index}"
        found.append(Device(name, DeviceKind.CUDA, "Fake", 1 << 30, 0, name, node=str(node)))
    return found


@contextmanager
def another_owner(device: Device) -> Iterator[int]:
    """Let another process own a device."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, device.node], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


def test_a_device_of_another_daemon_is_left_alone_until_it_ends(gpus: list[Device]) -> None:
    with another_owner(gpus[0]) as pid:
        found = claim(gpus, seconds=0)
        assert found.devices == [gpus[1]]
        assert list(found.locks) == [gpus[1].node]
        assert found.elsewhere == [
            f"GPU cuda:0 (Fake) is used by the daemon of {getpass.getuser()} (pid {pid}): "
            "use that one, or stop it."
        ]
        found.close()
        with pytest.raises(DeviceError, match=rf"GPU cuda:0 .* \(pid {pid}\)"):
            claim(gpus[:1], seconds=0)
        assert owner(gpus[0]) == f"the daemon of {getpass.getuser()} (pid {pid})"
    assert owner(gpus[0]) == ""
    found = claim(gpus, seconds=0)
    assert (found.devices, found.elsewhere) == (gpus, [])
    found.close()


def test_a_lock_that_is_handed_on_is_held_all_the_time(gpus: list[Device]) -> None:
    first = claim(gpus, seconds=0)
    kept = {node: os.dup(fd) for node, fd in first.locks.items()}
    first.close()
    assert owner(gpus[0]).startswith("the daemon of")
    second = claim(gpus[1:], kept, seconds=0)  # the first one does not exist any more
    assert second.devices == gpus[1:]
    assert owner(gpus[0]) == ""
    with pytest.raises(DeviceError, match="cuda:1"):
        claim(gpus[1:], seconds=0)
    second.close()
    assert owner(gpus[1]) == ""


def test_an_exiting_owner_is_waited_for(
    gpus: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = claim(gpus, seconds=0)
    monkeypatch.setattr("time.sleep", lambda _: leaving.close())
    found = claim(gpus)
    assert found.devices == gpus
    found.close()


def test_the_recorded_owner_may_have_ended(gpus: list[Device]) -> None:
    fd = os.open(gpus[0].node, os.O_RDONLY)
    script = f"import fcntl; fcntl.flock({fd}, fcntl.LOCK_EX)"
    subprocess.run([sys.executable, "-c", script], pass_fds=[fd], check=True)
    assert owner(gpus[0]) == "another daemon"
    os.close(fd)


def test_software_devices_are_not_locked(gpus: list[Device]) -> None:
    software = replace(gpus[0], node="", kind=DeviceKind.SOFTWARE)
    assert owner(software) == ""
    claims = [claim([software], seconds=0) for _ in range(2)]
    assert claims == [Claim([software])] * 2


def test_a_gpu_whose_file_cannot_be_opened_is_used_and_that_is_logged(
    gpus: list[Device], caplog: pytest.LogCaptureFixture
) -> None:
    missing = replace(gpus[0], node=f"{gpus[0].node}.missing")
    part = replace(gpus[1], node="")
    assert claim([missing, part], seconds=0) == Claim([missing, part])
    assert caplog.text.count("nothing keeps other daemons from it") == 2


def test_the_doctor_reports_the_owner_of_a_device(
    gpus: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = replace(gpus[1], node=f"{gpus[1].node}.missing")
    monkeypatch.setattr(doctor, "configured_devices", lambda: [*gpus, missing])
    with another_owner(gpus[0]) as pid:
        found = list(doctor._devices())
    texts = [each.text for each in found]
    assert [each.state for each in found] == ["ok", "ok", "missing"]
    assert texts[0].endswith(f", used by the daemon of {getpass.getuser()} (pid {pid})")
    assert texts[1] == "cuda:1: Fake, 1.0 GiB"
    assert "cannot be locked" in texts[2]
