"""Graphs that ``torch.compile`` captures are compiled and run in the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from kernelproxy.native import build, libraries
from tests.conftest import RunProgram, daemon_directory
from tests.decorated import decorated
from tests.e2e.trainers import program, session_of, verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAMS = Path(__file__).resolve().parents[2] / "programs" / "compiling"
PROGRAM = PROGRAMS / "compiled.py"
STEPS = PROGRAMS / "compiled_steps.py"
NAMES = decorated(PROGRAM, "program")
NOTICE = (
    "jupyter_sing: torch.compile: a graph is not compiled and runs eagerly: it uses tests.twice"
)

Results = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Set one compute thread on both sides, and one cache of compiled code for all these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.setenv(name, "1")
        patch.setenv("JUPYTER_SING_DEVICES", "cpu:2GiB@1")
        patch.setenv("SING_CHECK_WRITES", "1")  # of graphs: snapshots rely on what they declare
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", str(libraries.cache_directory().parent / "inductor")
        )
        yield


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, run_program: RunProgram
) -> Iterator[tuple[Results, Results, str]]:
    """Return the results on the CPU, those on the proxied device, and the latter's stderr."""

    def results(text: str) -> Results:
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return {result["name"]: result for result in found}

    runtime_dir = tmp_path_factory.mktemp("compile") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        plain = run_program(PROGRAM, "cpu", proxied=False)
        proxied = run_program(PROGRAM, "cuda", proxied=True)
        yield results(plain.stdout), results(proxied.stdout), proxied.stderr


@pytest.mark.parametrize("name", NAMES)
def test_compiled_programs_give_what_they_give_without_a_proxy(
    both: tuple[Results, Results, str], name: str
) -> None:
    plain, proxied = both[0][name], both[1][name]
    for result in (plain, proxied):
        if result["error"]:
            pytest.fail(result["error"], pytrace=False)
    assert proxied.get("exact") == plain.get("exact")
    assert proxied.get("facts") == plain.get("facts")
    assert proxied.get("close", []) == pytest.approx(plain.get("close", []), rel=1e-6, abs=1e-7)


def test_a_call_is_one_record_and_graphs_of_the_host_are_none(
    both: tuple[Results, Results, str],
) -> None:
    assert both[1]["a_call_is_one_record"]["records"] == 10
    assert both[1]["graphs_of_the_host_stay_there"]["records"] == 0


def test_a_graph_that_cannot_be_shipped_is_reported_once(
    both: tuple[Results, Results, str],
) -> None:
    said = [line for line in both[2].splitlines() if "torch.compile" in line]
    assert len(said) == 1
    assert said[0].startswith(NOTICE)


@pytest.mark.usefixtures("runtime_dir")
def test_graphs_survive_suspensions_and_deaths_of_workers() -> None:
    with program(0, proxied=False, path=STEPS) as plain:
        assert plain.answer() == ["ready"]
        expected = [plain.train(3) for _ in range(4)]
    with program(0, proxied=True, path=STEPS) as proxied:
        assert proxied.answer() == ["ready"]
        got = [proxied.train(3)]
        assert verb(Suspend(proxied.session))["worker_pid"] is None
        assert verb(Resume(proxied.session))["worker_pid"] is not None
        got.append(proxied.train(3))
        os.kill(session_of(proxied)["worker_pid"], signal.SIGKILL)
        got.append(proxied.train(3))
        assert verb(Suspend(proxied.session))["worker_pid"] is None
        assert verb(Resume(proxied.session))["worker_pid"] is not None
        # It dies in the middle of this request.
        proxied.ask(3)
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(session_of(proxied)["worker_pid"], signal.SIGKILL)
        got.append(proxied.answer())
    assert got == expected


def test_without_a_compiler_programs_run_as_written(
    tmp_path: Path, run_program: RunProgram
) -> None:
    build.ensure(build.describe(), print)  # what the proxy itself has to compile
    with pytest.MonkeyPatch.context() as patch, daemon_directory(tmp_path / "runtime", patch):
        patch.setenv("CXX", str(tmp_path / "missing"))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        done = run_program(PROGRAM, "cuda", "a_call_is_one_record", proxied=True)
    (result,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert result["error"] == ""
    assert result["records"] > 10
    assert done.stderr.count("torch.compile: a graph is not compiled and runs eagerly") == 1
