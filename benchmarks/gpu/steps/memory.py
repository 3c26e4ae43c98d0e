"""Step: the device's memory is what the daemon says, and waiters get it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.daemon import session
from benchmarks.gpu import nvml
from benchmarks.gpu.judging import await_state, judged, status, verb
from benchmarks.gpu.processes import FailedError, Suite
from kernelproxy.common.protocol import Resume, Suspend

MIB = 1 << 20
SESSIONS = 6
#: What the daemon's account may differ from NVML's, and seconds in which it gets there: the daemon
#: asks NVML every two seconds.
ACCOUNT_PART = 0.01
ACCOUNT_SECONDS = 10.0
#: Bytes of the state that waits for a process that is not ours.
OUTSIDER_STATE_BYTES = 4 << 30
#: A process that is not ours: takes memory of the GPU until its standard input ends.
OUTSIDE = """
import sys, torch
held = torch.ones(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holds", flush=True)
sys.stdin.read()
"""


@contextmanager
def _outside(suite: Suite, bytes: int) -> Iterator[None]:
    """Run a process that holds memory of the device and belongs to no session."""
    with subprocess.Popen(
        [sys.executable, "-c", OUTSIDE, str(bytes)],
        env=suite.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        try:
            if process.stdout.readline().strip() != "holds":
                raise FailedError("a process outside of all sessions got no memory")
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def shared_memory(suite: Suite) -> tuple[str, list[str], Any]:
    """Compare the account with NVML's; let sessions have peaks, and one wait for an outsider."""
    wrong: dict[str, str] = {}
    lines = ["| check | |", "|---|---|"]
    with suite.daemon(suite.devices("" if suite.gpu else "512MiB")) as env, ExitStack() as stack:
        before = nvml.view()["used"] if suite.gpu else 0
        names = [f"idle {index}" for index in range(SESSIONS)]
        sides = [stack.enter_context(suite.side(env, proxied=True, name=name)) for name in names]
        for side in sides:
            side.order("hold", bytes=(1 if suite.small else 128) * MIB)
        if suite.gpu:
            used, said = _accounts(before)
            lines.append(
                f"| {SESSIONS} idle sessions: NVML, and the daemon "
                f"| {used // MIB} MiB, {said // MIB} MiB |"
            )
            if not _agree(used, said):
                wrong["account"] = f"NVML says {used // MIB} MiB, the daemon {said // MIB} MiB"
        for side in sides:
            side.order("forget")
        total = status().devices[0]["memory_total"]
        high, low = int(0.6 * total), int(0.1 * total)
        one, two = sides[:2]
        raised = one.order("peak", high=high, low=low, times=3)["raised"]
        looping: dict[str, str] = {}
        thread = threading.Thread(
            target=lambda: looping.update(one.order("peak", high=low, low=low, times=200))
        )
        thread.start()
        raised = raised or two.order("peak", high=high, low=high, times=2)["raised"]
        thread.join()
        raised = raised or looping.get("raised", "")
        lines.append(f"| a peak of 60 % beside a loop of 10 % | {raised or 'both get it'} |")
        if raised:
            wrong["peaks"] = raised
        raised = one.order("peak", high=2 * total, low=low, times=0)["raised"]
        again = one.order("peak", high=low, low=low, times=1)["raised"]
        lines.append(
            f"| twice the device's memory | {raised[:160].splitlines()[0] if raised else ''} |"
        )
        if not raised.startswith("OutOfMemoryError") or again:
            wrong["too much"] = f"{raised or 'nothing'} was raised, and then {again or 'nothing'}"
        if suite.gpu:
            lines.append(f"| an outsider | {_wait_for_outsider(suite, one, total, wrong)} |")
    try:
        return judged(4 if suite.gpu else 2, wrong), lines, None
    except FailedError as error:
        raise FailedError(str(error), lines) from None


def _agree(used: int, said: int) -> bool:
    return abs(used - said) <= ACCOUNT_PART * used


def _accounts(before: int) -> tuple[int, int]:
    """Return the bytes that sessions use, by NVML and by the daemon, when both agree or late."""
    end, pause = time.monotonic() + ACCOUNT_SECONDS, threading.Event()
    while True:
        used: int = nvml.view()["used"] - before
        device: dict[str, Any] = dict(status().devices[0])
        # Storages, and what the workers take beside them, also one without a session.
        said: int = device["memory_used"] + device["outside"]["contexts"]
        if _agree(used, said) or time.monotonic() > end:
            return used, said
        pause.wait(0.1)


def _wait_for_outsider(suite: Suite, side: Any, total: int, wrong: dict[str, str]) -> str:
    """Let a session be resumed while another process has the memory that it needs."""
    # A state that the host's memory has room for; the other sessions leave the device.
    count = min(total // 2, OUTSIDER_STATE_BYTES)
    expected = side.order("hold", bytes=count)["sum"]
    for name in (f"idle {index}" for index in reversed(range(SESSIONS))):
        identifier = session(name)["id"]
        verb(Suspend(identifier, "gpu suite"), suite)
    free = nvml.view()["free"]
    with _outside(suite, free - count), contextlib.suppress(Exception):
        verb(Resume(identifier), suite)  # it may also say that it waits
    waited = await_state(suite, "idle 0", lambda found: found["tier"] == "resident")
    if side.order("check")["sum"] != expected:
        wrong["outsider"] = "the state is not what it was"
    return f"resumed {waited:.1f} s after it had ended"
