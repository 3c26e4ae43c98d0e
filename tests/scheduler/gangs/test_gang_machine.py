"""Invariants of gangs, among notebooks, failures and late answers in any order.

All invariants of `test_engine_machine.py` hold with gangs, too. Here are those that only gangs
have: all devices or none, and a number of them that suits; each device is charged; one is given
back within one decision when a premium cell asks.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Grant, Preempt
from jupyter_sing.scheduler.gangs.ranks import sizes
from jupyter_sing.scheduler.settings import Tier
from jupyter_sing.scheduler.state import HOLDING, Phase
from tests.scheduler.engine.test_engine_machine import GB, NAMES, Cluster


class GangCluster(Cluster):
    """Notebooks and jobs on a few devices."""

    def most(self) -> int:
        """Return the devices of the largest node."""
        return min(2, len(self.places))

    @precondition(lambda self: len(self.host.notebooks) < len(NAMES))
    @rule(
        memory=st.integers(0, 6),
        tier=st.sampled_from(list(Tier)),
        user=st.sampled_from(["ann", "bob", "eve"]),
        ranks=st.sampled_from([2, 3, 4]),
        least=st.sampled_from([1, 1, 2]),
        seconds=st.sampled_from([1.0, 20.0, 80.0]),
    )
    def open_job(
        self, memory: int, tier: Tier, user: str, ranks: int, least: int, seconds: float
    ) -> None:
        name = next(name for name in NAMES if name not in self.host.notebooks)
        most = self.most()
        needs = memory * ranks if most == 1 or ranks > 2 else 2 * memory
        fits = min(memory, 15 // max(1, ranks)) if needs > 15 else memory
        self.open_as(
            name, fits * GB, user=user, tier=tier, gpus=most, gpus_min=min(least, most), ranks=ranks
        )
        self.busy.add(name)
        self.host.submit(name, seconds)

    @rule(data=st.data())
    def fail_device(self, data: st.DataObject) -> None:
        device = data.draw(st.sampled_from([place.id for place in self.places]))
        self.failed.add(device)
        self.host.fail(device)

    @precondition(lambda self: any(each.ranks for each in self.host.notebooks.values()))
    @rule(data=st.data(), device=st.integers(0, 3))
    def move_ranks(self, data: st.DataObject, device: int) -> None:
        """Ranks of a job are suspended, or leave a device, without the engine's doing."""
        jobs = [name for name, each in self.host.notebooks.items() if each.ranks]
        name = data.draw(st.sampled_from(sorted(jobs)))
        if self.host.engine._sessions[name].phase is Phase.LOADING:
            return  # it comes and goes at once
        gone = self.places[device % len(self.places)].id
        if gone not in self.host.notebooks[name].devices:
            self.host._drop(name, gone)
        places = tuple((d, held[name]) for d, held in self.host.resident.items() if name in held)
        self.host.tell(events.Located(self.host.now, name, places))

    @precondition(lambda self: len(self.host.notebooks) < len(NAMES) and not self.failed)
    @rule(memory=st.sampled_from([0, 1]))
    def ask_with_premium(self, memory: int) -> None:
        """A premium cell gets a device of a gang that could do with fewer, at once."""
        engine, now = self.host.engine, self.host.now
        waits = [s for s in engine._sessions.values() if s.phase is Phase.WAITING]
        gives = [
            s
            for s in engine._running.gangs()
            if s.gang is not None
            and s.gang.least < s.gpus
            and s.terms.tier is not Tier.PREMIUM
            and s.lease.right == ""
            and not any(d.incoming or d.used > 8 * GB for d in s.lease.devices)
        ]
        free = len(engine._leases.table.free)
        name = next(name for name in NAMES if name not in self.host.notebooks)
        self.open_as(name, memory * GB, user=f"new-{now}", tier=Tier.PREMIUM, vc="premium")
        self.busy.add(name)
        before = len(self.host.decided)
        self.host.submit(name, 1.0)
        if waits or free or not gives or memory:
            return
        new = [decision for _, decision in self.host.decided[before:]]
        assert any(isinstance(d, Preempt | Grant) for d in new), new
        stops = [d for d in new if isinstance(d, Preempt)]
        for stop in stops:
            if stop.session in {s.id for s in gives}:
                assert stop.resize, "it could have been left with a device"

    def is_lost(self, decision: Preempt) -> bool:
        """Guarantees stop what they have lent at any time."""
        return super().is_lost(decision) or self.host.engine._dispatcher.guaranteed

    @invariant()
    def holders_are_where_the_engine_put_them(self) -> None:
        """The same as without gangs; but a gang is on a failed device until it has stopped."""
        for device, held in self.host.holders.items():
            assert len(held) <= 1
            assert set(held) <= self.busy
            if device in self.failed:
                stopping = [self.host.engine._sessions[name] for name in held]
                assert all(s.gang and s.phase is Phase.STOPPING for s in stopping)

    @invariant()
    def gangs_have_a_number_of_devices_that_suits(self) -> None:
        for name, notebook in self.host.notebooks.items():
            if notebook.ranks and notebook.devices:
                terms = self.terms[name]
                suiting = sizes(
                    notebook.ranks, int(str(terms["gpus_min"])), int(str(terms["gpus"]))
                )
                assert len(notebook.devices) in suiting
                assert len({self.host.devices[d].node for d in notebook.devices}) == 1

    @invariant()
    def the_engine_charges_each_device_that_is_held(self) -> None:
        engine = self.host.engine
        for session in engine._sessions.values():
            if session.phase in HOLDING:
                assert session.flow.devices == pytest.approx(len(session.lease.devices))
                assert session.gpus == len(session.lease.devices)
            elif session.phase in (Phase.IDLE, Phase.WAITING):
                assert session.flow.devices == 0.0
            for quota in session.quotas:
                assert (session in quota.holders) == (
                    session.phase in HOLDING or session.phase is Phase.RESERVED
                )
        for quota in {id(q): q for s in engine._sessions.values() for q in s.quotas}.values():
            assert quota.taken == sum(each.gpus for each in quota.holders)
            assert quota.memory == sum(quota.residents.values())
        for device in engine._leases.table.devices.values():
            assert device.used == sum(device.residents.values()) <= device.memory

    @invariant()
    def memory_is_where_the_engine_counts_it(self) -> None:
        for name in self.host.notebooks:
            session = self.host.engine._sessions[name]
            if session.phase in (Phase.IDLE, Phase.WAITING) and not session.residency.moving:
                counted = {
                    device.id: device.residents[session]
                    for device in self.host.engine._leases.table.devices.values()
                    if session in device.residents
                }
                actual = {d: held[name] for d, held in self.host.resident.items() if name in held}
                assert {d: n for d, n in counted.items() if n} == {
                    d: n for d, n in actual.items() if n
                }


TestGangCluster = GangCluster.TestCase
TestGangCluster.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
