"""Invariants of the engine: notebooks, failures and late answers in any order.

The double asserts with every decision that a device has one holder and never more bytes than
memory, that tokens increase, and that no session in flight is migrated. Here are the other ones.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Preempt
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.leases import HivedGuarantees
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9
NAMES = [f"s{i}" for i in range(8)]
RUN_MIN = 1.0


class Cluster(RuleBasedStateMachine):
    """A few notebooks on a few devices."""

    @initialize(count=st.integers(1, 4), delay=st.sampled_from([0.0, 0.01, 2.0]))
    def begin(self, count: int, delay: float) -> None:
        self.places = [
            DeviceSpec(f"node{i // 2}/gpu{i % 2}", 16 * GB, f"node{i // 2}") for i in range(count)
        ]
        self.settings = EngineSettings(quanta=(1.0, 2.0, 4.0, 8.0), host_memory=20 * GB)
        self.host = FakeController(Engine(self.places, self.settings), self.places, delay)
        self.terms: dict[str, dict[str, object]] = {}
        self.checked = 0  # decisions may concern other sessions by now
        self.failed: set[str] = set()
        self.busy: set[str] = set()
        self.host.finished = self.busy.discard
        for index, name in enumerate(NAMES[:6]):  # more than there are devices, and memory
            self.open_as(name, (4 + index) * GB, user=("ann", "bob")[index % 2])
            self.busy.add(name)
            self.host.submit(name, 8.0)

    def open_as(self, name: str, memory: int, **terms: object) -> None:
        self.terms[name] = {"vc": "default", "tier": Tier.STANDARD, **terms}
        self.host.open(name, memory, **self.terms[name])

    def idle(self) -> list[str]:
        return sorted(set(self.host.notebooks) - self.busy)

    @precondition(lambda self: len(self.host.notebooks) < len(NAMES))
    @rule(
        memory=st.integers(0, 15),
        tier=st.sampled_from(list(Tier)),
        user=st.sampled_from(["ann", "bob"]),
        wide=st.booleans(),
    )
    def open(self, memory: int, tier: Tier, user: str, wide: bool) -> None:
        name = next(name for name in NAMES if name not in self.host.notebooks)
        gpus = 2 if wide and len(self.places) >= 2 else 1
        self.open_as(name, memory * GB, user=user, tier=tier, gpus=gpus)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def submit(self, data: st.DataObject, seconds: float) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        self.busy.add(name)
        self.host.submit(name, seconds)

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.host.run_until(self.host.now + seconds)

    @precondition(lambda self: self.host.notebooks)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.host.notebooks)))
        self.host.lose(name)
        del self.host.notebooks[name]
        self.busy.discard(name)
        self.host.tell(events.SessionRemoved(self.host.now, name))
        self.host.tell(events.SessionRemoved(self.host.now, name))

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy.discard(name)
        if self.host.notebooks[name].devices:
            self.host.halt(name)
        self.host.tell(events.CellFinished(self.host.now, name))

    @precondition(lambda self: self.host.notebooks)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.host.notebooks)))
        self.host.lose(name)
        self.host.tell(events.WorkerDied(self.host.now, name))

    @rule(data=st.data())
    def fail_device(self, data: st.DataObject) -> None:
        device = data.draw(st.sampled_from([place.id for place in self.places]))
        self.failed.add(device)
        self.host.fail(device)

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def heal_device(self, data: st.DataObject) -> None:
        device = data.draw(st.sampled_from(sorted(self.failed)))
        self.failed.discard(device)
        self.host.tell(events.DeviceHealed(self.host.now, device))

    @precondition(lambda self: self.host.notebooks)
    @rule(data=st.data(), token=st.integers(0, 3))
    def answer_late(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.host.notebooks)))
        stale = self.host.notebooks[name].token - 1 - token
        before = len(self.host.decided)
        self.host.tell(events.Released(self.host.now, name, stale))
        self.host.tell(events.Started(self.host.now, name, stale))
        assert self.host.notebooks[name].token > stale
        assert len(self.host.decided) - before <= len(NAMES)

    @rule(
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        throttle=st.sampled_from([1.0, 10.0]),
        devices=st.sampled_from([2, math.inf]),
        memory=st.sampled_from([16 * GB, math.inf]),
        seconds=st.sampled_from([20.0, math.inf]),
        hold=st.sampled_from([3.0, math.inf]),
        promised=st.sampled_from([None, "flat", 0, 1]),
    )
    def reconfigure(
        self,
        weight: float,
        throttle: float,
        devices: float,
        memory: float,
        seconds: float,
        hold: float,
        promised: str | int | None,
    ) -> None:
        running = {device: list(held) for device, held in self.host.holders.items()}
        self.settings = EngineSettings(
            quanta=(1.0, 2.0, 4.0, 8.0),
            throttle=throttle,
            host_memory=20 * GB,
            user_weights={("default", "ann"): weight},
            user_limits={("default", "ann"): QuotaLimits(devices, memory, seconds)},
            vc_limits={"default": QuotaLimits(devices=devices)},
            max_hold={Tier.STANDARD: hold},
        )
        given = None if promised is None else self.guarantees(promised)
        self.host.tell(events.Reconfigured(self.host.now, self.settings, given))
        for device, held in running.items():
            assert set(held) <= set(self.host.holders[device])

    def guarantees(self, promised: str | int) -> NoGuarantees | HivedGuarantees:
        if isinstance(promised, str):
            return NoGuarantees([place.id for place in self.places])
        nodes: dict[str, list[str]] = {}
        for place in self.places:
            nodes.setdefault(place.node, []).append(place.id)
        return HivedGuarantees(Configuration.of_nodes(nodes, {"default": promised}))

    @precondition(lambda self: self.host.notebooks)
    @rule(
        data=st.data(),
        vc=st.sampled_from(["default", "guests", None]),
        user=st.sampled_from(["ann", "bob", None]),
        pinned=st.booleans(),
    )
    def change_terms(
        self, data: st.DataObject, vc: str | None, user: str | None, pinned: bool
    ) -> None:
        name = data.draw(st.sampled_from(sorted(self.host.notebooks)))
        held = self.host.notebooks[name].devices
        terms = self.terms[name]
        terms.update({"vc": vc or terms["vc"], "user": user or terms["user"]})
        tier = terms["tier"]
        assert isinstance(tier, Tier)
        pinned = pinned and self.host.notebooks[name].memory == 0  # otherwise others may never fit
        self.host.tell(events.TermsChanged(self.host.now, name, tier, 1.0, pinned, False, vc, user))
        assert self.host.notebooks[name].devices == held or not held

    @rule(pause=st.sampled_from([0.0, 3.0]))
    def restart(self, pause: float) -> None:
        """End the daemon and all workers; another daemon continues."""
        host = self.host
        written = json.loads(json.dumps(host.engine.accounts(host.now)))
        before = host.engine.statistics().served
        host.now += pause
        host.restart(Engine(self.places, self.settings, accounts=written, now=host.now))
        assert host.engine.statistics().served == before
        for device in sorted(self.failed):
            host.tell(events.DeviceFailed(host.now, device))
        for name, notebook in sorted(host.notebooks.items()):
            host.tell(
                events.SessionAdded(
                    host.now,
                    name,
                    memory=notebook.memory,
                    **self.terms[name],  # type: ignore[arg-type]
                )
            )
            if name in self.busy:
                host.tell(events.CellSubmitted(host.now, name))

    @invariant()
    def holders_are_where_the_engine_put_them(self) -> None:
        for device, held in self.host.holders.items():
            assert len(held) <= 1
            assert not (held and device in self.failed)
            assert set(held) <= self.busy

    @invariant()
    def leases_are_whole(self) -> None:
        for name, notebook in self.host.notebooks.items():
            for device in notebook.devices:
                assert name in self.host.holders[device]

    @invariant()
    def all_waiters_receive_the_reason(self) -> None:
        for name in sorted(self.busy):
            said = self.host.engine.explain(name, self.host.now)
            assert (said is None) == bool(self.host.notebooks[name].devices)
            assert said is None or (said.reason and said.position >= 1)

    def is_lost(self, decision: Preempt) -> bool:
        """True if a session stops because it has lost a part of what it executes on."""
        return decision.reason.endswith("has failed")

    @invariant()
    def no_session_is_stopped_before_the_minimum_run(self) -> None:
        """A session runs for a second at least, unless a premium session preempts a basic one."""
        started: dict[tuple[str, int], float] = {}
        for at, event in self.host.log:
            if isinstance(event, events.Started):  # the first: later ones are stale
                started.setdefault((event.session, event.token), at)
        new, self.checked = self.host.decided[self.checked :], len(self.host.decided)
        for at, decision in new:
            if isinstance(decision, Preempt) and not decision.resize and not self.is_lost(decision):
                begun = started.get((decision.session, decision.token), at - RUN_MIN)
                preemptor = decision.reason.partition(" goes first")[0]
                names = (decision.session, preemptor)
                tiers = [self.terms.get(name, {}).get("tier") for name in names]
                floor = 0.0 if tiers == [Tier.BASIC, Tier.PREMIUM] else RUN_MIN
                assert at - begun >= floor - 1e-6, decision

    def teardown(self) -> None:
        """Once the devices work and no further events happen, all cells end."""
        if not hasattr(self, "host"):
            return
        for device in sorted(self.failed):
            self.host.tell(events.DeviceHealed(self.host.now, device))
        self.failed.clear()
        if self.host.notebooks:
            # A user with no device time left would wait until the next day.
            self.host.tell(
                events.Reconfigured(self.host.now, replace(self.settings, user_limits={}))
            )
        self.host.run_until(self.host.now + 20_000.0)
        assert self.busy == set(), "somebody starves"
        served = self.host.engine.statistics().served
        assert all(seconds >= 0.0 for seconds in served.values())
        assert not any(self.host.holders.values())


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
