"""A kernel counts as running while its process runs, or will run again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kernelproxy.kernel_host.process_handle import Body

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def start(program: str = "import signal; signal.pause()") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"print(flush=True); {program}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_its_end_is_the_kernels(start: Start) -> None:
    process = start("raise SystemExit(3)")
    body = Body(process, process.pid)
    process.wait()
    assert body.poll() == 3
    assert not body.become(start(), 1)  # too late: the new process is ended
    assert body.poll() == 3


def test_a_saved_process_is_detached_and_another_one_may_attach(start: Start) -> None:
    first, second = start(), start()
    body = Body(first, first.pid)
    body.leave()
    first.kill()  # as when the process is saved
    first.wait()
    assert body.poll() is None
    body.gone()
    assert (body.poll(), body.pid) == (None, 0)
    body.signal(signal.SIGINT)
    assert body.become(second, second.pid)
    assert (body.poll(), body.pid) == (None, second.pid)
    body.signal(signal.SIGTERM)
    second.wait()
    assert body.poll() == -signal.SIGTERM


def test_a_process_that_could_not_be_saved_stays(start: Start) -> None:
    process = start()
    body = Body(process, process.pid)
    body.leave()
    body.stay()
    assert body.poll() is None
    body.kill()
    process.wait()
    assert body.poll() == -signal.SIGKILL


def test_the_one_before_is_ended(start: Start) -> None:
    first, second = start(), start()
    body = Body(first, first.pid)
    assert body.become(second, second.pid)
    assert first.returncode == -signal.SIGKILL
    assert body.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_detached_kernel_ends_at_once(start: Start, number: signal.Signals) -> None:
    process = start()
    body = Body(process, process.pid)
    body.leave()
    body.gone()
    body.signal(number)
    assert body.poll() == -signal.SIGKILL


def test_ending_it_while_it_is_being_saved_is_final(start: Start) -> None:
    process = start()
    body = Body(process, process.pid)
    body.leave()
    body.kill()
    assert body.poll() == -signal.SIGKILL
    assert process.wait() == -signal.SIGKILL
    body.reap()
