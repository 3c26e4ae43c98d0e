"""Programs have the same results on the proxied device as on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import Resume, SessionReply, StatusReply, StatusRequest, Suspend
from tests.conftest import ROOT, RunProgram, daemon_directory
from tests.decorated import decorated

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = TESTS / "programs" / "operators" / "behaviours.py"
# The same number of threads on both sides, since it decides how sums are split.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JUPYTER_SING_DEVICES": "cpu:2GiB@1"}


NAMES = [
    name
    for path in sorted((TESTS / "behaviours").glob("*.py"))
    for name in decorated(path, "behaviour")
]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[dict[str, dict[str, Any]]]:
    """Return results by name: all behaviours, run one after the other in one session."""
    runtime_dir = tmp_path_factory.mktemp("behaviours") / "runtime"
    # Also check that operators change only what their write sets name, as snapshots rely on it.
    env = {**ONE_THREAD, "SING_CHECK_WRITES": "1"}
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        done = run_program(PROGRAM, proxied=True, env=env)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield {result["name"]: result for result in found}


@pytest.mark.parametrize("name", NAMES)
def test_behaviour(results: dict[str, dict[str, Any]], name: str) -> None:
    assert name in results, "the behaviour was not tried"
    if not results[name]["ok"]:
        pytest.fail(results[name]["message"], pytrace=False)


def test_nothing_else_was_compared(results: dict[str, dict[str, Any]]) -> None:
    assert sorted(results) == sorted(NAMES)


@pytest.mark.usefixtures("runtime_dir")
def test_they_are_the_same_when_workers_are_suspended_and_killed() -> None:
    command = [sys.executable, "-m", "jupyter_sing.cli", "run", str(PROGRAM)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **ONE_THREAD}
    failed, count = {}, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if not line.startswith("{"):
                continue
            result = json.loads(line)
            count += 1
            if not result["ok"]:
                failed[result["name"]] = result["message"]
            # The program continues meanwhile, so this may happen at any operator.
            disturb(kill=count % 4 == 0)
    assert program.returncode == 0
    assert failed == {}
    assert count == len(NAMES)


def disturb(*, kill: bool) -> None:
    """Kill the worker of the only session, or suspend and resume it."""
    with agent_client.connect(start=False) as agent:
        sessions = agent.expect(StatusReply, StatusRequest()).sessions
        for session in sessions:
            if not kill:
                try:
                    agent.expect(SessionReply, Suspend(session["id"], "Suspended by a test"))
                    agent.expect(SessionReply, Resume(session["id"]))
                except ControlError as error:
                    if error.reason not in ("ended", "unknown-session"):  # the program's own end
                        raise
            elif session["worker_pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(session["worker_pid"], signal.SIGKILL)
