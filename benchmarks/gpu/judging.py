"""Shared by the steps: verdicts about many results, and requests to the daemon."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.daemon import session
from benchmarks.gpu.processes import FailedError, SkippedError, Suite, tail_of
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Message, SessionReply, StatusReply, StatusRequest

POLL_SECONDS = 0.02


def judged(count: int, wrong: dict[str, str]) -> str:
    """Return the verdict on `count` results.

    Raises
    ------
    FailedError
        If any is wrong, or nothing was tried.
    """
    if not count:
        raise FailedError("nothing was tried")
    if wrong:
        first = "; ".join(f"{name}: {tail_of(text, 1)}" for name, text in list(wrong.items())[:8])
        raise FailedError(f"{len(wrong)} of {count} are wrong: {first}")
    return f"{count} of {count}"


def objects(printed: str) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines that a program printed."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def need(*modules: str) -> None:
    """Skip the step if a module is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"not installed here: {', '.join(missing)}")


def need_gpu(suite: Suite) -> None:
    """Skip the step on a software device."""
    if not suite.gpu:
        raise SkippedError("there is no GPU")


def verb(request: Message, suite: Suite) -> None:
    """Send the daemon a request about a session."""
    with agent_client.connect(start=False) as agent:
        agent.expect(SessionReply, request, max(1.0, suite.limit - time.monotonic()))


def status() -> StatusReply:
    """Return what the daemon reports about its sessions and devices."""
    with agent_client.connect(start=False) as agent:
        return agent.expect(StatusReply, StatusRequest())


def await_state(suite: Suite, name: str, reached: Callable[[dict[str, Any]], bool]) -> float:
    """Wait until a session's state satisfies a condition; return the seconds that it took.

    Raises
    ------
    TimeoutError
        If the step's time ends before.
    """
    began = time.monotonic()
    while not reached(found := session(name)):
        if time.monotonic() > suite.limit - 2:
            raise TimeoutError(f"the session {name} stayed {found['state']}: {found['reason']}")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


@contextmanager
def workers_of(name: str) -> Iterator[set[int]]:
    """Collect the pids of all workers that a session has during the block."""
    pids: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            # The session may end while it is watched.
            with contextlib.suppress(ControlError, ValueError):
                pids.add(session(name)["worker_pid"] or 0)

    pids.add(session(name)["worker_pid"] or 0)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield pids
    finally:
        over.set()
        thread.join()
        pids.discard(0)
