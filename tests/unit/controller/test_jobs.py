"""Jobs of several ranks in the controller: a session per rank on one side, a gang on the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from jupyter_sing.controller.jobs.job import job_id, seating
from jupyter_sing.scheduler.state import Phase
from kernelproxy.common.errors import ControlError
from tests.doubles.scheduler import virtual
from tests.doubles.scheduler.ranks import MB, AgentDouble

RANKS = [f"{number:012x}" for number in range(1, 5)]
ALICE = "a" * 12
PREMIUM = """
virtual_clusters:
  default: {users: [{name: alice, tier: premium}, {name: bob, tier: standard}]}
"""


def begun(agent: AgentDouble, ranks: list[str] = RANKS) -> None:
    """Open the ranks of a job, and let all of them ask for a device."""
    for number, each in enumerate(ranks):
        agent.open(each)
        agent.controller.joined(each, "train", number, len(ranks))
        agent.ask(each)


def scenario(act: Callable[[AgentDouble], Coroutine[Any, Any, None]]) -> Any:
    """Make a test of a coroutine that gets an agent with two devices, in virtual time."""

    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            agent = AgentDouble(monkeypatch)
            await act(agent)
            agent.controller._driver.close()

        virtual.run(main())

    test.__name__, test.__doc__ = act.__name__, act.__doc__
    return test


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, ["a", "b"]),
        ({"r0": "b"}, ["b", "a"]),
        ({"r0": "a", "r1": "b", "r2": "a", "r3": "a"}, ["b", "a"]),
        ({"r0": "elsewhere"}, ["a", "b"]),
    ],
)
def test_seating_moves_few_ranks(where: dict[str, str], expected: list[str]) -> None:
    ranks = {f"r{number}": number for number in range(4)}
    assert seating(ranks, 4, ["a", "b"], where) == expected


def test_job_ids_are_the_same_after_a_restart_and_differ_by_user() -> None:
    assert job_id("bob", "none") == job_id("bob", "none") != job_id("alice", "none")


@scenario
async def test_a_job_runs_on_all_devices_in_intervals_of_its_ranks(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    found = agent.where(*RANKS)
    assert found[0] == found[1] != found[2] == found[3]
    assert agent.controller.held() == {
        each: (agent.sessions[each].device, agent.sessions[each].token) for each in RANKS
    }
    (said,) = agent.noted(RANKS[3], "grant")[-1:]
    assert "Job of 4 ranks runs on 2 devices." in said


@scenario
async def test_ranks_are_sessions_until_all_have_joined(agent: AgentDouble) -> None:
    for number, each in enumerate(RANKS[:3]):
        agent.open(each)
        agent.controller.joined(each, "train", number, 4)
        agent.ask(each)
    await asyncio.sleep(5.0)
    assert len(agent.controller._engine._sessions) == 3
    assert sum(map(bool, agent.where(*RANKS[:3]))) == 2  # one waits for its turn
    agent.open(RANKS[3])
    agent.controller.joined(RANKS[3], "train", 3, 4)
    await asyncio.sleep(5.0)
    assert len(agent.controller._engine._sessions) == 1
    assert all(agent.where(*RANKS[:3]))
    assert agent.where(RANKS[3]) == [""]  # it has nothing to execute
    agent.ask(RANKS[3])
    await asyncio.sleep(0.1)
    assert all(agent.where(*RANKS))


@scenario
async def test_a_rank_with_a_lease_is_awaited_after_an_earlier_one_was_refused(
    agent: AgentDouble,
) -> None:
    agent.open(RANKS[0])
    agent.ask(RANKS[0])
    await asyncio.sleep(agent.delay / 2)
    agent.fail("cpu:0")  # its lease there is over; the refusal comes when it has another one
    await asyncio.sleep(0.1)
    assert agent.where(RANKS[0]) == ["cpu:1"]
    agent.open(RANKS[1])
    for number, each in enumerate(RANKS[:2]):
        agent.controller.joined(each, "train", number, 2)
    job = agent.controller._jobs.of(RANKS[0])
    assert job is not None
    assert list(job.awaited) == RANKS[:1]
    agent.ask(RANKS[1])
    await asyncio.sleep(1.0)
    assert agent.where(*RANKS[:2]) == ["cpu:1", "cpu:1"]


@scenario
async def test_a_rank_that_gets_another_lease_while_it_is_awaited_stops_again(
    agent: AgentDouble,
) -> None:
    agent.open(ALICE, "alice", "cpu:1")
    for each in RANKS[:2]:
        agent.open(each)
    for each in (ALICE, RANKS[0]):
        agent.ask(each)
    await asyncio.sleep(0.1)
    mine, other = agent.where(RANKS[0], ALICE)
    agent.fail(mine)
    for number, each in enumerate(RANKS[:2]):
        agent.controller.joined(each, "train", number, 2)
    agent.rest(ALICE)  # the rank is still being stopped
    agent.ask(RANKS[1])
    await asyncio.sleep(5.0)
    assert agent.where(*RANKS[:2]) == [other, other]


@scenario
async def test_a_rank_may_join_before_it_is_opened(agent: AgentDouble) -> None:
    for number, each in reversed(list(enumerate(RANKS))):
        agent.controller.joined(each, "train", number, 4)
    for each in RANKS:
        agent.open(each)
        agent.ask(each)
    await asyncio.sleep(1.0)
    assert all(agent.where(*RANKS))
    assert len(agent.controller._engine._sessions) == 1


@scenario
async def test_jobs_of_other_users_with_the_same_name_are_others(agent: AgentDouble) -> None:
    for number, each in enumerate(RANKS):
        agent.open(each, user=("bob", "alice")[number % 2])
        agent.controller.joined(each, "none", number // 2, 2)
    await asyncio.sleep(0.1)
    assert len(agent.controller._engine._sessions) == 2


@scenario
async def test_a_rank_that_cannot_be_is_refused(agent: AgentDouble) -> None:
    agent.open(RANKS[0])
    with pytest.raises(ControlError, match="has no rank 2"):
        agent.controller.joined(RANKS[0], "train", 2, 2)


@scenario
async def test_a_job_shrinks_for_a_premium_cell_and_grows_again(agent: AgentDouble) -> None:
    agent.controller.apply(PREMIUM, dry=False)
    begun(agent)
    await asyncio.sleep(20.0)
    agent.open(ALICE, user="alice", device="cpu:1")
    agent.ask(ALICE)
    await asyncio.sleep(0.1)
    assert agent.where(*RANKS, ALICE) == ["cpu:0"] * 4 + ["cpu:1"]
    text = "Job of 4 ranks shrinks from 2 devices to 1: alice waits with premium."
    for each in RANKS:
        assert agent.noted(each, "shrink") == [text]
        manner = (
            "Job of 4 ranks runs on 1 of 2 devices: alice waits with premium; it grows again when"
            " a device has been idle for 30 s."
        )
        assert agent.noted(each, "grant")[-1].endswith(manner)
        assert agent.sessions[each].manner == manner
    agent.rest(ALICE)
    await asyncio.sleep(29.0)
    assert agent.where(*RANKS) == ["cpu:0"] * 4
    # The second rank that moves there can share what the first one has.
    assert agent.prepared == [(RANKS[2], "cpu:1")]
    await asyncio.sleep(2.0)
    assert sorted(agent.where(*RANKS)) == ["cpu:0"] * 2 + ["cpu:1"] * 2
    grown = "Job of 4 ranks grows from 1 device to 2: a device has been idle for 30 s."
    assert agent.noted(RANKS[0], "grow") == [grown]


@scenario
async def test_others_do_not_see_the_name_of_a_job(agent: AgentDouble) -> None:
    agent.controller._engine._leases.table.devices["cpu:1"].healthy = False
    begun(agent)
    await asyncio.sleep(1.0)
    agent.open(ALICE, user="alice")
    agent.ask(ALICE)
    await asyncio.sleep(0.1)
    outlook = agent.controller.outlook(ALICE)
    assert outlook is not None
    assert "bob" in outlook.reason
    assert "name of" not in outlook.reason


@scenario
async def test_ranks_that_wait_say_the_same(agent: AgentDouble) -> None:
    others = [f"{letter * 12}" for letter in "bc"]
    for number, each in enumerate(others):
        agent.open(each, user=each, device=f"cpu:{number}")
        agent.ask(each)
    begun(agent)
    await asyncio.sleep(0.05)
    outlooks = {agent.controller.outlook(each) for each in RANKS}
    assert len(outlooks) == 1
    assert None not in outlooks
    assert {agent.sessions[each].reason for each in RANKS[:3]} != {""}


@scenario
async def test_a_rank_that_rests_comes_back_at_once(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    before = agent.sessions[RANKS[1]].token
    assert before is not None
    agent.rest(RANKS[1])
    await asyncio.sleep(1.0)
    assert agent.where(*RANKS)[0]
    agent.ask(RANKS[1])
    after = agent.sessions[RANKS[1]].token
    assert after is not None
    assert after > before
    for each in RANKS:
        agent.rest(each)
    await asyncio.sleep(0.1)
    assert agent.controller.held() == {}
    assert [s.phase for s in agent.controller._engine._sessions.values()] == [Phase.IDLE]


@scenario
async def test_a_rank_whose_worker_dies_gets_its_device_again(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    place = agent.where(RANKS[2])
    agent.lose(RANKS[2])
    await asyncio.sleep(0.1)
    assert agent.where(RANKS[2]) == place
    assert all(agent.where(*RANKS))


@scenario
async def test_a_job_continues_until_its_last_rank_has_ended(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    for count, each in enumerate(RANKS, 1):
        agent.close(each)
        await asyncio.sleep(1.0)
        assert all(agent.where(*RANKS[count:]))
    assert agent.controller._engine._sessions == {}
    assert all(d.is_free for d in agent.controller._engine._leases.table.devices.values())


@scenario
async def test_a_rank_that_ends_while_the_job_stops_holds_up_nothing(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(20.0)
    agent.delay = 1.0
    agent.open(ALICE, user="alice")
    agent.ask(ALICE)
    await asyncio.sleep(0.5)  # its ranks are being stopped
    agent.close(RANKS[0])
    agent.close(RANKS[3])
    await asyncio.sleep(5.0)
    assert all(agent.where(ALICE, RANKS[1], RANKS[2]))


@scenario
async def test_a_refused_lease_of_one_rank_stops_all_and_is_tried_again(agent: AgentDouble) -> None:
    left = {RANKS[2]: 2}

    def fails(action: str, session: str) -> bool:
        left[session] = left.get(session, 0) - 1
        return left[session] >= 0

    agent.fails = fails
    begun(agent)
    await asyncio.sleep(0.9)
    assert not any(agent.where(*RANKS))  # the devices are tried again after a second
    seen = set()
    for _ in range(400):
        await asyncio.sleep(0.05)
        seen.add(sum(map(bool, agent.where(*RANKS))))
    assert 0 in seen
    assert all(agent.where(*RANKS))


@scenario
async def test_a_pinned_rank_parts_the_job_until_it_is_unpinned(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    agent.pin(RANKS[0])
    await asyncio.sleep(1.0)
    assert len(agent.controller._engine._sessions) == 4
    assert {agent.sessions[each].manner for each in RANKS} == {""}
    place = agent.sessions[RANKS[0]].device
    await asyncio.sleep(60.0)
    assert agent.sessions[RANKS[0]].device == place
    agent.pin(RANKS[0], pinned=False)
    await asyncio.sleep(1.0)
    assert len(agent.controller._engine._sessions) == 1
    assert all(agent.where(*RANKS))


@scenario
async def test_ranks_that_asked_for_a_device_by_name_stay_there(agent: AgentDouble) -> None:
    for number, each in enumerate(RANKS[:2]):
        agent.open(each, device="cpu:1", bound=True)
        agent.controller.joined(each, "train", number, 2)
        agent.ask(each)
    for _ in range(100):
        await asyncio.sleep(0.1)
        assert {agent.sessions[each].device for each in RANKS[:2]} == {"cpu:1"}
        assert len(agent.executing("cpu:1")) <= 1
    assert len(agent.controller._engine._sessions) == 2


@scenario
async def test_a_rank_that_is_moved_by_hand_returns_to_its_seat(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    before = agent.where(*RANKS)
    agent.move(RANKS[0], before[3])
    await asyncio.sleep(0.1)
    assert agent.where(*RANKS) == before


@scenario
async def test_memory_of_ranks_keeps_its_place_when_they_join(agent: AgentDouble) -> None:
    for number, each in enumerate(RANKS):
        agent.open(each, device=f"cpu:{1 - number // 2}")
        agent.ask(each)
        await asyncio.sleep(0.1)
        agent.rest(each)
    before = [agent.sessions[each].device for each in RANKS]
    for number, each in enumerate(RANKS):
        agent.controller.joined(each, "train", number, 4)
    (gang,) = agent.controller._engine._sessions.values()
    devices = agent.controller._engine._leases.table.devices.values()
    counted = {d.id: d.residents.get(gang, 0) for d in devices}
    assert counted == {d: before.count(d) * 10 * MB for d in counted}


@scenario
async def test_a_job_continues_on_the_devices_that_are_left(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    agent.fail("cpu:1")
    await asyncio.sleep(5.0)
    assert agent.where(*RANKS) == ["cpu:0"] * 4
    agent.heal("cpu:1")
    await asyncio.sleep(32.0)
    assert sorted(set(agent.where(*RANKS))) == ["cpu:0", "cpu:1"]


@scenario
async def test_a_restarted_agent_has_the_job_again(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(10.0)
    agent.restart()
    random = Random(1)
    calls: list[Callable[[], None]] = []
    for number, each in enumerate(RANKS):
        terms = agent.sessions[each].terms
        calls.append(lambda terms=terms: agent.controller.opened(terms))  # type: ignore[misc]
        calls.append(
            lambda each=each, number=number: agent.controller.joined(each, "train", number, 4)  # type: ignore[misc]
        )
    random.shuffle(calls)
    for call in calls:
        call()
    for each in RANKS:
        agent.controller.wants(each)
    await asyncio.sleep(2.0)
    assert all(agent.where(*RANKS))
    assert len(agent.controller._engine._sessions) == 1


@scenario
async def test_an_idle_job_is_evicted_rank_by_rank(agent: AgentDouble) -> None:
    for each in RANKS:
        agent.open(each, memory=200 * MB)
    for number, each in enumerate(RANKS):
        agent.controller.joined(each, "train", number, 4)
        agent.ask(each)
    await asyncio.sleep(1.0)
    for each in RANKS:
        agent.rest(each)
    agent.open(ALICE, user="alice", memory=800 * MB)
    agent.ask(ALICE)
    await asyncio.sleep(1.0)
    (place,) = agent.where(ALICE)
    assert place
    gone = [each for each in RANKS if agent.noted(each, "evict")]
    assert gone == [each for each in RANKS if agent.sessions[each].device == place]
    assert len(gone) == 2


@scenario
async def test_a_rank_that_joins_another_job_leaves_the_first(agent: AgentDouble) -> None:
    begun(agent, RANKS[:2])
    await asyncio.sleep(1.0)
    for number, each in enumerate(RANKS[:2]):
        agent.controller.joined(each, "next", number, 2)
    await asyncio.sleep(1.0)
    assert list(agent.controller._engine._sessions) == [job_id("bob", "next")]
    assert all(agent.where(*RANKS[:2]))


@scenario
async def test_a_job_counts_once_in_the_effects_of_a_policy(agent: AgentDouble) -> None:
    begun(agent)
    await asyncio.sleep(1.0)
    counts = [agent.controller._jobs.devices_of(each, held=True) for each in RANKS]
    assert counts == [2, 0, 0, 0]
