"""Graphs that ``torch.compile`` captures are compiled and run in the worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from kernelproxy.native import build, libraries
from tests.conftest import RunProgram, daemon_directory
from tests.decorated import decorated
from tests.doubles.session.pids import existing
from tests.e2e.trainers import program, session_of, verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROGRAMS = Path(__file__).resolve().parents[2] / "programs" / "compiling"
PROGRAM = PROGRAMS / "compiled.py"
STEPS = PROGRAMS / "compiled_steps.py"
NAMES = decorated(PROGRAM, "program")
NOTICE = (
    "jupyter_sing: torch.compile: a graph is not compiled and runs eagerly: it uses tests.twice"
)

#: Programs that run in one process; compiling takes seconds for each.
GROUP = 3

Results = dict[str, dict[str, Any]]
Both = tuple[Results, Results, str]


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
) -> Iterator[Callable[[str], Both]]:
    """Run the group of a program, once: results on the CPU, on the proxied device, its stderr."""
    known: dict[int, Both] = {}

    def results(text: str) -> Results:
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return {result["name"]: result for result in found}

    def run(name: str) -> Both:
        group = NAMES.index(name) // GROUP
        if group not in known:
            names = NAMES[group * GROUP : (group + 1) * GROUP]
            plain = run_program(PROGRAM, "cpu", *names, proxied=False)
            proxied = run_program(PROGRAM, "cuda", *names, proxied=True)
            known[group] = results(plain.stdout), results(proxied.stdout), proxied.stderr
        return known[group]

    runtime_dir = tmp_path_factory.mktemp("compile") / "runtime"
    with pytest.MonkeyPatch.context() as patch, daemon_directory(runtime_dir, patch):
        yield run


@pytest.mark.parametrize("name", NAMES)
def test_compiled_programs_give_what_they_give_without_a_proxy(
    both: Callable[[str], Both], name: str
) -> None:
    plain, proxied = (side[name] for side in both(name)[:2])
    for result in (plain, proxied):
        if result["error"]:
            pytest.fail(result["error"], pytrace=False)
    assert proxied.get("exact") == plain.get("exact")
    assert proxied.get("facts") == plain.get("facts")
    assert proxied.get("close", []) == pytest.approx(plain.get("close", []), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "records"), [("a_call_is_one_record", 10), ("graphs_of_the_host_stay_there", 0)]
)
def test_a_call_is_one_record_and_graphs_of_the_host_are_none(
    both: Callable[[str], Both], name: str, records: int
) -> None:
    assert both(name)[1][name]["records"] == records


def test_a_graph_that_cannot_be_shipped_is_reported_once(both: Callable[[str], Both]) -> None:
    told = [both(name)[2] for name in NAMES[::GROUP]]
    said = [line for text in told for line in text.splitlines() if "torch.compile" in line]
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
        os.kill(existing(session_of(proxied)["worker_pid"]), signal.SIGKILL)
        got.append(proxied.train(3))
        assert verb(Suspend(proxied.session))["worker_pid"] is None
        assert verb(Resume(proxied.session))["worker_pid"] is not None
        # It dies in the middle of this request.
        proxied.ask(3)
        worker = session_of(proxied)["worker_pid"]
        with contextlib.suppress(ProcessLookupError):
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
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
