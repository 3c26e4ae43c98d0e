"""Jobs of several ranks, as a session's process reports them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.api.answers import Answers
from kernelproxy.agent.session.job import JobMembership, JobRank
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import RANKS_MAX, Done, JoinJob


class Told:
    """Scheduler that notes the ranks that joined."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int, int]] = []

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        self.calls.append((session, job, rank, size))


def membership(told: Told, owner: int = 7) -> tuple[JobMembership, list[str]]:
    """Return a session's membership, and what is done to its core."""
    done: list[str] = []
    core: Any = SimpleNamespace(
        id="s",
        owner=owner,
        check_usable=lambda: None,
        persist=lambda: done.append("persist"),
        changed=lambda: done.append("changed"),
        request_reconcile=lambda: done.append("reconcile"),
    )
    arbiter: Any = told
    return JobMembership(core, arbiter), done


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "ü", "line\n", "a\x1b[31m"])
def test_the_id_of_a_job_is_a_short_token(name: str) -> None:
    with pytest.raises(ControlError, match="The id of a job") as raised:
        JobRank(name, 0, 2).check()
    assert raised.value.reason == "bad-request"


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (0, -1), (0, RANKS_MAX + 1)])
def test_a_rank_is_below_the_size_of_its_job(rank: int, size: int) -> None:
    with pytest.raises(ControlError, match=f"Rank {rank} of {size} is none"):
        JobRank("run", rank, size).check()


def test_the_largest_job_and_the_longest_id_are_accepted() -> None:
    JobRank("x" * 128, RANKS_MAX - 1, RANKS_MAX).check()
    JobRank("10.0.0.1:29500/none_0@a-b+c", 0, 1).check()


def test_a_job_is_persisted_before_the_scheduler_knows_it_and_once() -> None:
    told = Told()
    member, done = membership(told)
    for _ in range(2):
        member.join(JobRank("run", 1, 2))
    assert (told.calls, done) == ([("s", "7:run", 1, 2)], ["persist", "changed", "reconcile"])
    member.join(JobRank("later", 0, 1))
    assert (len(told.calls), len(done)) == (2, 6)


def test_equal_ids_of_two_users_are_two_jobs() -> None:
    told = Told()
    for owner in (7, 8):
        membership(told, owner)[0].join(JobRank("none", 0, 2))
    assert len({job for _, job, _, _ in told.calls}) == 2


def test_the_next_agent_reports_the_job_to_its_scheduler() -> None:
    told = Told()
    before, _ = membership(Told())
    assert before.record() is None
    before.join(JobRank("run", 1, 2))
    after, _ = membership(told)
    after.recover(before.record())
    assert (after.job, told.calls) == (JobRank("run", 1, 2), [("s", "7:run", 1, 2)])
    membership(told)[0].recover(None)
    assert len(told.calls) == 1


@pytest.mark.parametrize(
    ("pid", "uid", "allowed"), [(5, 7, True), (9, 7, True), (5, 0, True), (9, 0, False)]
)
def test_a_session_joins_at_the_request_of_its_process_or_its_owner(
    pid: int, uid: int, allowed: bool
) -> None:
    member, _ = membership(Told())
    session = SimpleNamespace(
        core=SimpleNamespace(owner=7), kernel=SimpleNamespace(pid=5), membership=member
    )
    agent: Any = SimpleNamespace(find=lambda name, uid: session)
    channel: Any = None
    asking = Answers(agent).answer(JoinJob("s", "run", 0, 2), channel, pid, uid)
    if allowed:
        assert asyncio.run(asking) == Done()
        assert member.job == JobRank("run", 0, 2)
        return
    with pytest.raises(ControlError, match="Only the session's owner"):
        asyncio.run(asking)
    assert member.job is None
