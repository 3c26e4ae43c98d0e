"""For any sequence of events, a cluster is consistent and its promises can be kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jupyter_sing.scheduler.hived import (
    Configuration,
    ConfigurationError,
    GroupMember,
    GroupRequest,
    GroupState,
    GroupWaiting,
    HivedCluster,
    Placed,
    Reserved,
    VirtualCellSpec,
    VirtualClusterSpec,
    configuration_of,
    reconfigured,
)
from tests.scheduler.books import check, pictured

pytestmark = pytest.mark.slow

BOUNDED = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def configuration(virtual_clusters: dict[str, Any]) -> Configuration:
    """Two racks of two nodes with two switches of two devices; two nodes with three devices."""
    types = {
        "switch": {"childCellType": "gpu", "childCellNumber": 2},
        "node": {"childCellType": "switch", "childCellNumber": 2, "isNodeLevel": True},
        "rack": {"childCellType": "node", "childCellNumber": 2},
        "small": {"childCellType": "old", "childCellNumber": 3, "isNodeLevel": True},
    }
    racks = [
        {"cellType": "rack", "cellChildren": [{"cellAddress": "n0"}, {"cellAddress": "n1"}]},
        {
            "cellType": "rack",
            "cellChildren": [
                {"cellAddress": "n2", "cellChildren": [{"pinnedCellId": "pin"}, {}]},
                {"cellAddress": "n3"},
            ],
        },
    ]
    small = [{"cellType": "small", "cellAddress": f"s{index}"} for index in range(2)]
    return configuration_of(
        {
            "physicalCluster": {"cellTypes": types, "physicalCells": racks + small},
            "virtualClusters": virtual_clusters,
        }
    )


def cells(**numbers: int) -> list[dict[str, Any]]:
    paths = {
        "rack": "rack",
        "node": "rack.node",
        "switch": "rack.node.switch",
        "gpu": "rack.node.switch.gpu",
        "small": "small",
        "old": "small.old",
    }
    return [{"cellType": paths[name], "cellNumber": count} for name, count in numbers.items()]


GUARANTEES: dict[str, dict[str, Any]] = {
    "A": {"virtualCells": cells(node=1, switch=1, small=1)},
    "B": {"virtualCells": cells(node=1, gpu=2), "pinnedCells": [{"pinnedCellId": "pin"}]},
    "C": {"virtualCells": cells(gpu=1, old=2)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "A": {"virtualCells": cells(node=2, old=1)},
    "B": {"virtualCells": cells(switch=1)},
    "C": {"virtualCells": cells(gpu=1, small=1)},
}
DEVICES = 22
NODES = ["n0", "n1", "n2", "n3", "s0", "s1"]

members = st.lists(
    st.builds(GroupMember, st.integers(1, 2), st.sampled_from([1, 1, 1, 2, 3, 4])),
    min_size=1,
    max_size=2,
).map(tuple)
suggestions = st.none() | st.sets(st.sampled_from(NODES), min_size=3).map(frozenset)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A group that arrives. If `regret`, it may be removed at once."""

    vc: str
    priority: int
    members: tuple[GroupMember, ...]
    lazy: bool
    pinned: bool
    suggested: frozenset[str] | None
    preempt: bool
    prefer: list[int]
    regret: bool

    def request(self, name: str) -> GroupRequest:
        return GroupRequest(
            name,
            self.vc,
            self.priority,
            self.members,
            pinned="pin" if self.pinned and self.priority >= 0 else None,
            lazy_preemption=self.lazy,
            any_pinned=not self.lazy,
        )


def rarely(strategy: st.SearchStrategy[Any], usual: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 5).flatmap(lambda dice: strategy if not dice else st.just(usual))


newcomers = st.builds(
    Arrival,
    vc=st.sampled_from("AABBC"),
    priority=st.sampled_from([-1, -1, 0, 0, 1, 2, 5]),
    members=members,
    lazy=st.booleans(),
    pinned=rarely(st.just(True), False),
    suggested=rarely(suggestions, None),
    preempt=rarely(st.just(False), True),
    prefer=st.lists(st.integers(0, DEVICES - 1), max_size=4, unique=True),
    regret=rarely(st.just(True), False),
)
which = st.integers(0, 30)


class Guaranteed(RuleBasedStateMachine):
    """State machine: groups come and go, hardware fails, promises change."""

    @initialize()
    def begin(self) -> None:
        self.cluster = HivedCluster(configuration(GUARANTEES))
        self.count = 0
        self.changes = 0

    def some(self, index: int, *, preempting: bool) -> str | None:
        """Return a group of that kind, or None."""
        names = [n for n, g in self.cluster.groups.items() if g.preempting == preempting]
        return names[index % len(names)] if names else None

    @rule(arrivals=st.lists(newcomers, min_size=6, max_size=10))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.count += 1
            self.place(f"g{self.count}", arrival)
            check(self.cluster)

    def place(self, name: str, arrival: Arrival) -> None:
        request = arrival.request(name)
        if request.pinned not in (None, *self.cluster.virtual_clusters[arrival.vc].pinned):
            request = dataclasses.replace(request, pinned=None)
        devices = list(self.cluster.devices.values())
        near = [devices[index] for index in arrival.prefer]
        before = pictured(self.cluster)
        rights = {n: g.guaranteed for n, g in self.cluster.groups.items()}
        outcome = self.cluster.schedule(
            request, arrival.suggested, preempt=arrival.preempt, prefer=near
        )
        if isinstance(outcome, GroupWaiting):
            assert pictured(self.cluster) == before
            assert name not in self.cluster.groups
            return
        group = outcome.group
        # A gang has all of its devices, each once, on nodes that it may use.
        physical = [seat.physical for seat in group.seats]
        assert sorted(len(s.seats) for s in group.slots) == sorted(
            m.leaves for m in request.members for _ in range(m.pods)
        )
        assert len({id(device) for device in physical}) == len(physical)
        assert all(len({seat.physical.node for seat in s.seats}) == 1 for s in group.slots)
        assert not any(device.bad for device in physical)
        suggested = arrival.suggested
        assert suggested is None or all(device.node in suggested for device in physical)
        assert group.guaranteed == request.guaranteed
        if isinstance(outcome, Reserved):
            assert arrival.preempt
            assert request.guaranteed
            for victim in outcome.victims:
                # Only groups of the same virtual cluster lose promises, and only to higher
                # priorities.
                own = victim.request.vc == request.vc
                lower = victim.request.priority < request.priority
                assert (own and lower) or not rights[victim.request.name]
        if arrival.regret and not outcome.cancelled:
            if isinstance(outcome, Reserved):
                self.cluster.cancel(name)
                assert pictured(self.cluster) == before
            elif not outcome.downgraded:
                self.cluster.release(name)
                assert pictured(self.cluster) == before

    @rule(index=which)
    def leave(self, index: int) -> None:
        name = self.some(index, preempting=False)
        if name is not None:
            self.cluster.release(name)

    @rule(index=which)
    def victims_leave(self, index: int) -> None:
        name = self.some(index, preempting=True)
        if name is None:
            return
        group = self.cluster.groups[name]
        outcome = self.cluster.schedule(group.request)
        while isinstance(outcome, Reserved):
            assert outcome.group is self.cluster.groups[name]
            for victim in outcome.victims:
                self.cluster.release(victim.request.name)
                check(self.cluster)
            outcome = self.cluster.schedule(group.request)
        if isinstance(outcome, Placed):
            assert self.cluster.state(name) is GroupState.ALLOCATED

    @rule(index=which)
    def give_up(self, index: int) -> None:
        name = self.some(index, preempting=True)
        if name is None:
            return
        seats = self.cluster.groups[name].seats
        victims = [seat.physical.user.group for seat in seats if seat.physical.user]
        self.cluster.cancel(name)
        for victim in victims:
            assert victim is self.cluster.groups[victim.request.name]
            others = [s for s in victim.seats if s.physical.reserver]
            assert others or victim.state is GroupState.ALLOCATED

    @rule(index=st.integers(0, DEVICES - 1), whole=st.booleans(), good=st.booleans())
    def health(self, index: int, whole: bool, good: bool) -> None:
        device = list(self.cluster.devices.values())[index]
        self.cluster.set_health(device.node if whole else str(device.device), good)

    @precondition(lambda self: self.count > 20 * self.changes)
    @rule(guarantees=st.sampled_from([GUARANTEES, OTHERS]))
    def change(self, guarantees: dict[str, dict[str, Any]]) -> None:
        self.changes += 1
        held = {
            name: [seat.physical.device for seat in group.seats]
            for name, group in self.cluster.groups.items()
            if not group.preempting
        }
        same = self.cluster.configuration == configuration(guarantees)
        self.cluster, changes = reconfigured(self.cluster, configuration(guarantees))
        assert changes.lost == ()
        assert list(self.cluster.groups) == list(held)
        for name, group in self.cluster.groups.items():
            assert [seat.physical.device for seat in group.seats] == held[name]
            if name in changes.downgraded:
                assert not group.guaranteed
        if same:
            assert changes.downgraded == ()

    @invariant()
    def books_are_right(self) -> None:
        check(self.cluster)
        for vc in self.cluster.virtual_clusters:
            cells = self.cluster.guaranteed_cells(vc)
            leaves = {c.name: c.levels for c in self.cluster.configuration.chains}
            total = sum(leaves[cell.chain][cell.level - 1].leaves for cell in cells)
            assert 0 <= self.cluster.unused(vc) <= total


TestGuaranteed = Guaranteed.TestCase
TestGuaranteed.settings = BOUNDED

arrivals = st.tuples(
    st.sampled_from(["A", "B", "C"]),
    st.sampled_from([-1, 0, 0, 1, 2]),
    members,
    st.booleans(),
)
steps = st.lists(arrivals | st.integers(0, 40), min_size=5, max_size=40)
SHAPES = {
    "A": cells(node=1, switch=1),
    "B": cells(rack=1),
    "C": cells(gpu=2),
}


def served(cluster: HivedCluster, request: GroupRequest) -> list[str] | None:
    """Schedule, release opportunistic victims, and return the others, or None for waiting."""
    outcome = cluster.schedule(request)
    if isinstance(outcome, GroupWaiting):
        return None
    lost: list[str] = []
    if isinstance(outcome, Reserved):
        for victim in outcome.victims:
            if victim.guaranteed:
                lost.append(victim.request.name)
            cluster.release(victim.request.name)
        outcome = cluster.schedule(request)
    assert isinstance(outcome, Placed), "who is within its promise is served"
    check(cluster)
    return sorted(lost)


@BOUNDED
@given(steps)
def test_a_virtual_cluster_is_served_as_if_it_were_alone(
    steps: list[tuple[str, int, tuple[GroupMember, ...], bool] | int],
) -> None:
    guarantees = {name: {"virtualCells": shape} for name, shape in SHAPES.items()}
    shared = HivedCluster(configuration(guarantees))
    alone = {name: HivedCluster(configuration({name: guarantees[name]})) for name in guarantees}
    arrived: list[tuple[str, str]] = []
    for step in steps:
        if isinstance(step, int):
            if step < len(arrived):
                vc, name = arrived[step]
                for cluster in (shared, alone[vc]):
                    if name in cluster.groups:
                        cluster.release(name)
            continue
        vc, priority, wanted, lazy = step
        name = f"g{len(arrived)}"
        arrived.append((vc, name))
        request = GroupRequest(name, vc, priority, wanted, lazy_preemption=lazy)
        answer = served(shared, request)
        if request.guaranteed:
            assert answer == served(alone[vc], request)
            assert _guaranteed(shared, vc) == _guaranteed(alone[vc], vc)


def _guaranteed(cluster: HivedCluster, vc: str) -> list[str]:
    return [n for n, g in cluster.groups.items() if g.request.vc == vc and g.guaranteed]


@BOUNDED
@given(steps)
def test_the_same_calls_give_the_same_answers(
    steps: list[tuple[str, int, tuple[GroupMember, ...], bool] | int],
) -> None:
    def played() -> list[object]:
        cluster = HivedCluster(configuration(GUARANTEES))
        log: list[object] = []
        for number, step in enumerate(steps):
            if isinstance(step, int):
                name = next(iter(list(cluster.groups)[step:]), None)
                if name is not None:
                    cluster.release(name)
            else:
                vc, priority, wanted, lazy = step
                request = GroupRequest(f"g{number}", vc, priority, wanted, lazy_preemption=lazy)
                log.append(type(cluster.schedule(request)).__name__)
            log.append(pictured(cluster))
        return log

    assert played() == played()


promised = st.lists(
    st.tuples(st.sampled_from(["A", "B"]), st.integers(1, 4), st.integers(0, 5)), max_size=6
)


@settings(BOUNDED, max_examples=200)
@given(promised)
def test_a_configuration_is_refused_exactly_if_it_cannot_be_kept(
    promised: list[tuple[str, int, int]],
) -> None:
    base = configuration({})
    specs = tuple(
        VirtualClusterSpec(
            vc,
            tuple(VirtualCellSpec("rack", level, n) for name, level, n in promised if name == vc),
        )
        for vc in ("A", "B")
    )
    # Each cell size of a chain divides the next: filling from the largest down finds a fit if any.
    room = [8, 8]
    fits = True
    for level, size in ((4, 8), (3, 4), (2, 2), (1, 1)):
        for _ in range(sum(n for _, wanted, n in promised if wanted == level)):
            target = next((i for i, free in enumerate(room) if free >= size), None)
            if target is None:
                fits = False
            else:
                room[target] -= size
    try:
        kept = HivedCluster(dataclasses.replace(base, virtual_clusters=specs))
    except ConfigurationError:
        kept = None
    assert (kept is not None) == fits
    if kept is not None:
        check(kept)
