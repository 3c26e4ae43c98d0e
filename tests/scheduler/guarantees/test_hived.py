"""HiveD's conformance table: the same requests are accepted and rejected, with the same victims.

Group and cell states agree, too (hived/README.md). Placements are compared if our search order
gives the same; the other four are named.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from jupyter_sing.scheduler.hived import (
    CellState,
    Configuration,
    ConfigurationError,
    GroupMember,
    GroupRequest,
    GroupState,
    GroupWaiting,
    HivedCluster,
    RequestError,
    configuration_of,
    reconfigured,
)
from tests.scheduler.books import check
from tests.scheduler.guarantees.pods import PodBound, Pods, PodVictims

DATA = Path(__file__).parents[1] / "hived"
TABLE: dict[str, Any] = json.loads((DATA / "conformance.json").read_text("utf-8"))
PODS: dict[str, dict[str, Any]] = TABLE["pods"]

# We place the largest pod first (8 and 9 swap nodes), and use the first of equal free cells (24 and
# 25).
PLACED_OTHERWISE = {"pod8", "pod9", "pod24", "pod25"}


WHOLE: dict[str, Any] = yaml.safe_load((DATA / "config.yaml").read_text("utf-8"))


def document() -> dict[str, Any]:
    """Return HiveD's example, cells only, for a test to change."""
    return copy.deepcopy({key: WHOLE[key] for key in ("physicalCluster", "virtualClusters")})


def in_order_of_test(configuration: Configuration) -> Configuration:
    """Return chains in the reverse order of their names, the search order of HiveD's test."""
    chains = sorted(configuration.chains, key=lambda chain: chain.name, reverse=True)
    return dataclasses.replace(configuration, chains=tuple(chains))


def request_of(pod: str) -> GroupRequest:
    entry = PODS[pod]
    return GroupRequest(
        name=entry["group"],
        vc=entry["vc"],
        priority=entry["priority"],
        members=tuple(
            GroupMember(m["pods"], m["leafCells"]) for m in TABLE["groups"][entry["group"]]
        ),
        leaf_type=entry["leafCellType"] or None,
        pinned=entry["pinnedCell"] or None,
        lazy_preemption=entry["lazyPreemption"],
    )


class ComparedCluster:
    """A cluster that schedules pods of the table; every answer is compared with the table."""

    def __init__(self, changed: dict[str, Any] | None = None) -> None:
        configuration = in_order_of_test(configuration_of(changed or document()))
        self.cluster = HivedCluster(configuration)
        self.pods = Pods(self.cluster)
        self.nodes = frozenset(device.node for device in self.cluster.devices.values())

    def schedule(
        self, pod: str, suggested: frozenset[str] | None = None, *, preempt: bool = True
    ) -> PodBound | PodVictims | GroupWaiting:
        """Schedule a pod, with any outcome."""
        answer = self.pods.schedule(
            pod, PODS[pod]["leafCells"], request_of(pod), suggested, preempt=preempt
        )
        check(self.cluster)
        return answer

    def expect(self, pod: str, suggested: frozenset[str] | None = None) -> None:
        """Schedule a pod, and compare the outcome with the table."""
        answer = self.schedule(pod, suggested)
        bound = TABLE["expectedBind"].get(pod)
        victims = TABLE["expectedPreemptVictims"].get(pod)
        if bound is not None:
            assert isinstance(answer, PodBound), (pod, answer)
            assert len(answer.devices) == len(bound["leafCells"])
            if pod not in PLACED_OTHERWISE:
                assert answer.node == bound["node"]
                indices = [int(str(d.device).rpartition("/")[2]) for d in answer.devices]
                assert indices == bound["leafCells"]
        elif victims is not None:
            assert isinstance(answer, PodVictims), (pod, answer)
            assert sorted(answer.pods) == victims
            assert self.state(pod) is GroupState.PREEMPTING
        else:
            assert isinstance(answer, GroupWaiting), (pod, answer)
            assert self.state(pod) is GroupState.PENDING

    def release(self, pod: str) -> None:
        self.pods.release(pod)
        check(self.cluster)

    def state(self, pod: str) -> GroupState:
        return self.cluster.state(PODS[pod]["group"])

    def health(self, node: str, *, good: bool) -> None:
        self.cluster.set_health(node, good)
        check(self.cluster)

    def free_cells(self, vc: str, chain: str, level: int) -> list[bool]:
        """Return for each unused guaranteed cell whether it is healthy."""
        cells = [
            c for c in self.cluster.guaranteed_cells(vc) if (c.chain, c.level) == (chain, level)
        ]
        return [not cell.bad for cell in cells if cell.priority == -2]


@pytest.fixture
def run() -> ComparedCluster:
    return ComparedCluster()


@pytest.fixture
def normal(run: ComparedCluster) -> ComparedCluster:
    """The state after the nineteen requests of normal operations."""
    for pod in TABLE["shouldSucceed"]:
        run.expect(pod)
    return run


def delete_all(run: ComparedCluster) -> None:
    placed = [pod for group in run.cluster.groups.values() for pod in group.pods]
    for pod in reversed(placed):
        run.release(pod)
    for pod in PODS:
        run.pods.withdraw(pod, PODS[pod]["group"])
        check(run.cluster)
    assert run.cluster.groups == {}


def test_normal_operations(normal: ComparedCluster) -> None:
    assert normal.state("pod16") is GroupState.PREEMPTING
    assert normal.state("pod5") is GroupState.BEING_PREEMPTED
    delete_all(normal)


def test_without_lazy_preemption_the_holder_of_the_cells_is_the_victim(
    normal: ComparedCluster,
) -> None:
    normal.expect("pod26")


@pytest.mark.parametrize("pods", TABLE["shouldFail"], ids="+".join)
def test_requests_that_could_never_be_served_are_refused(
    normal: ComparedCluster, pods: list[str]
) -> None:
    for pod in pods:
        with pytest.raises(RequestError):
            normal.schedule(pod)
    delete_all(normal)


def test_suggested_nodes(run: ComparedCluster) -> None:
    run.expect("pod36", frozenset({"0.0.1.0"}))
    run.release("pod36")
    run.expect("pod37", frozenset({"0.0.3.0"}))
    run.expect("pod38", frozenset({"0.0.3.1"}))
    run.release("pod37")
    run.release("pod38")
    without = run.nodes - {"0.0.3.1"}
    run.expect("pod27", without)
    assert isinstance(run.schedule("pod27", run.nodes), PodBound)
    run.schedule("pod33", run.nodes, preempt=False)
    assert run.state("pod33") is GroupState.PENDING
    run.schedule("pod33", without)
    assert run.state("pod33") is GroupState.PENDING
    run.schedule("pod33", run.nodes)
    assert run.state("pod33") is GroupState.PREEMPTING
    run.schedule("pod33", without)
    assert run.state("pod33") is GroupState.PENDING
    assert run.state("pod27") is GroupState.ALLOCATED


def test_backtracking_and_reverted_lazy_preemption() -> None:
    changed = document()
    cells = changed["virtualClusters"]["VC1"]["virtualCells"]
    cells[0]["cellNumber"], cells[3]["cellNumber"] = 0, 3
    run = ComparedCluster(changed)
    run.expect("pod39", frozenset({"0.0.3.2", "0.0.3.3"}))
    run.expect("pod40", frozenset({"0.0.4.3"}))
    run.expect("pod41", frozenset({"0.0.3.2", "0.0.3.3", "0.0.4.3"}))
    for pod in ("pod39", "pod40"):
        assert run.state(pod) is GroupState.ALLOCATED
        assert run.cluster.groups[PODS[pod]["group"]].guaranteed


def test_stateful_preemption(run: ComparedCluster) -> None:
    for pod in TABLE["statefulPreemption"]:
        run.expect(pod)
        if pod == "pod33":
            run.release("pod28")
            states = {s.physical.state for s in run.cluster.groups["group24"].seats}
            assert states == {CellState.RESERVED}
        if pod == "pod35":
            seats = list(run.cluster.groups["group26"].seats)
            run.pods.withdraw(pod, "group26")
            check(run.cluster)
            for seat in seats:
                if seat.physical.state is CellState.USED:
                    assert seat.physical.priority == PODS["pod34"]["priority"]
                else:
                    assert seat.physical.state is CellState.FREE
        for group in TABLE["deletedPreemptorGroups"].get(pod, []):
            assert run.cluster.state(group) is GroupState.PENDING
    assert run.state("pod34") is GroupState.ALLOCATED


def test_bad_nodes_and_doomed_cells() -> None:
    changed = document()
    changed["virtualClusters"]["VC2"]["virtualCells"][2]["cellType"] = (
        "3-DGX2-V100-NODE.DGX2-V100-NODE"
    )
    run = ComparedCluster(changed)
    chain = "3-DGX2-V100-NODE"

    def free(vc: str) -> list[bool]:
        return run.free_cells(vc, chain, 5)

    assert isinstance(run.schedule("pod42", frozenset({"0.0.2.0"})), PodBound)
    run.health("0.0.2.1", good=False)
    assert (free("VC1"), free("VC2")) == ([True], [True])
    assert isinstance(run.schedule("pod43", frozenset({"0.0.2.2"})), PodBound)
    assert (free("VC1"), free("VC2")) == ([False], [])
    run.release("pod43")
    assert (free("VC1"), free("VC2")) == ([True], [True])
    run.health("0.0.2.2", good=False)
    assert (free("VC1"), free("VC2")) == ([False], [False])
    run.health("0.0.2.2", good=True)
    assert (free("VC1"), free("VC2")) == ([True], [True])
    run.health("0.0.2.0", good=False)
    run.health("0.0.2.2", good=False)
    run.release("pod42")
    assert (free("VC1"), free("VC2")) == ([False, False], [False])


def test_safe_relaxed_buddy_allocation() -> None:
    changed = document()
    vc1 = changed["virtualClusters"]["VC1"]["virtualCells"]
    vc1[0]["cellNumber"], vc1[2]["cellNumber"], vc1[3]["cellNumber"] = 4, 0, 0
    vc2 = changed["virtualClusters"]["VC2"]["virtualCells"]
    vc2[2] = {"cellType": "4-DGX2-V100-NODE.2-DGX2-V100-NODE", "cellNumber": 1}
    run = ComparedCluster(changed)
    nodes = frozenset({"0.0.3.2", "0.0.3.3", "0.0.4.2", "0.0.4.3"})
    run.expect("pod44", nodes)
    run.health("0.0.3.3", good=False)
    run.expect("pod45", nodes)
    run.health("0.0.4.3", good=False)
    run.expect("pod46", nodes | {"0.0.4.0", "0.0.4.1"})  # would break the promise to VC2


def test_reconfiguration_keeps_what_runs(normal: ComparedCluster) -> None:
    changed = document()
    physical = changed["physicalCluster"]
    # A chain becomes shorter.
    physical["cellTypes"]["DGX2-V100-NODE"] = {
        "childCellType": "DGX2-V100",
        "childCellNumber": 16,
        "isNodeLevel": True,
    }
    cells = physical["physicalCells"]
    # A node is removed.
    cells[7]["cellChildren"][0]["cellChildren"][0]["cellAddress"] = "0.0.3.100"
    # Fewer cells are promised than are held.
    changed["virtualClusters"]["VC2"]["virtualCells"][0]["cellNumber"] = 1
    # A rack is split into its nodes, and replaced by another one.
    rack = copy.deepcopy(cells[8])
    nodes = [node for pair in cells[8]["cellChildren"] for node in pair["cellChildren"]]
    for index, node in enumerate(n for pair in rack["cellChildren"] for n in pair["cellChildren"]):
        node["cellAddress"] = f"0.0.4.{100 + index}"
    apart = [{"cellType": "DGX2-V100-NODE", "cellAddress": n["cellAddress"]} for n in nodes]
    cells[8:9] = apart[:1]
    cells += [*apart[1:], rack]
    before = {n: list(g.pods) for n, g in normal.cluster.groups.items() if not g.preempting}
    held = {n: g.guaranteed for n, g in normal.cluster.groups.items()}

    cluster, changes = reconfigured(normal.cluster, in_order_of_test(configuration_of(changed)))
    check(cluster)
    assert {name: list(group.pods) for name, group in cluster.groups.items()} == before
    for pod in TABLE["shouldBeLazyPreempted"]:
        assert not cluster.groups[PODS[pod]["group"]].guaranteed
    assert changes.cancelled == ("group11",)
    assert changes.lost == ("group5",)
    # The others have kept their guarantees.
    for name in ("group1", "group2", "group3", "group12", "group16"):
        assert held[name]
        assert cluster.groups[name].guaranteed
    assert sorted(changes.downgraded) == ["group13", "group9"]
    for name in list(cluster.groups):
        cluster.release(name)
        check(cluster)


def test_invalid_initial_assignment_is_refused_with_level_and_numbers() -> None:
    changed = document()
    cells = changed["virtualClusters"]["VC1"]["virtualCells"]
    cells[0]["cellType"] = "CT1-NODE"
    cells[1] = {"cellType": "CT1-NODE.CT1", "cellNumber": 2}
    with pytest.raises(
        ConfigurationError, match=r"3 cells of level 2 \(CT1-NODE\) of chain CT1-NODE, and 2 are"
    ):
        configuration_of(changed)
