"""Ranks report their job: what is sent, and when."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernelproxy.common.protocol import JoinJob
from kernelproxy.kernel.activation import state
from kernelproxy.kernel.activation.jobs import job_report
from tests.unit.fake_daemon import FakeDaemon


class FakeStore:
    """A store over which ranks meet."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = value
        return self.values[key].encode()


def c10d(store: Any, rank: int = 0, size: int = 2, backend: str = "gloo") -> Any:
    """Return a module that stands for ``distributed_c10d``, of a process that reports its job."""
    module: Any = ModuleType("distributed_c10d")
    module.made = []
    module.init_process_group = lambda *args, **kwargs: module.made.append((args, kwargs))
    module._get_default_store = lambda: store
    module.get_backend = lambda: backend
    module.get_rank, module.get_world_size = lambda: rank, lambda: size
    job_report.report_groups(module)
    return module


@pytest.fixture
def here(fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> state.Activation:
    """State of a process that has a session."""
    line: Any = "a connection"
    found = dataclasses.replace(state.Activation(), session="s7", link=line)
    monkeypatch.setattr(state, "_current", found)
    return found


def test_ranks_report_the_same_job_and_their_places(
    fake_daemon: FakeDaemon, here: state.Activation
) -> None:
    store = FakeStore()
    for rank in range(2):
        module = c10d(store, rank)
        module.init_process_group("gloo", timeout=3)
        assert module.made == [(("gloo",), {"timeout": 3})]
    (name,) = store.values.values()
    assert fake_daemon.requests == [JoinJob("s7", name, 0, 2), JoinJob("s7", name, 1, 2)]


def test_two_jobs_have_different_ids(fake_daemon: FakeDaemon, here: state.Activation) -> None:
    for _ in range(2):
        c10d(FakeStore()).init_process_group()
    assert len({each.job for each in fake_daemon.requests if isinstance(each, JoinJob)}) == 2


def test_a_rank_without_a_session_reports_when_it_has_one(
    fake_daemon: FakeDaemon, here: state.Activation
) -> None:
    here.link = None
    job_report.send()
    c10d(FakeStore(), 1, 4).init_process_group()
    assert fake_daemon.requests == []
    job_report.send()  # as when it has opened one
    (sent,) = fake_daemon.requests
    assert isinstance(sent, JoinJob)
    assert (sent.rank, sent.size) == (1, 4)


def test_a_group_that_cannot_be_made_is_not_reported(
    fake_daemon: FakeDaemon, here: state.Activation
) -> None:
    module = c10d(FakeStore())

    def fail() -> None:
        raise ValueError("no such backend")

    module.init_process_group = fail
    job_report.report_groups(module)
    with pytest.raises(ValueError, match="no such backend"):
        module.init_process_group()
    assert (fake_daemon.requests, here.job) == ([], None)


def test_ranks_that_are_no_processes_are_not_reported(
    fake_daemon: FakeDaemon, here: state.Activation
) -> None:
    for backend in ("fake", "threaded"):
        c10d(FakeStore(), backend=backend).init_process_group()
    c10d(None, backend="mpi").init_process_group()  # it has no store
    assert (fake_daemon.requests, here.job) == ([], None)


def test_a_rank_continues_without_the_daemon(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line: Any = "a connection"
    monkeypatch.setattr(state, "_current", state.Activation(session="s7", link=line))
    c10d(FakeStore()).init_process_group()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("jupyter_sing: the daemon does not know that this process is a rank")


def test_a_forked_child_of_a_rank_is_none(here: state.Activation) -> None:
    here.job = ("run", 0, 2)
    state.begin_child()
    assert here.job is None
