"""Configurations that are refused and the reasons, and leases as the engine requests them."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_sing.scheduler.decisions import Bound, NoPlacement, Victims
from jupyter_sing.scheduler.hived import (
    CellState,
    Configuration,
    ConfigurationError,
    GroupState,
    HivedCluster,
    HivedGuarantees,
    RequestError,
    VirtualCellSpec,
    configuration_of,
)
from jupyter_sing.scheduler.hived.mapping import Favour, Mapper
from tests.scheduler.books import check, pictured

TYPES = {
    "switch": {"childCellType": "gpu", "childCellNumber": 2},
    "node": {"childCellType": "switch", "childCellNumber": 2, "isNodeLevel": True},
    "rack": {"childCellType": "node", "childCellNumber": 2},
}


def rack(*addresses: str, **more: Any) -> dict[str, Any]:
    return {"cellType": "rack", "cellChildren": [{"cellAddress": a} for a in addresses], **more}


def refused(
    physical: list[dict[str, Any]],
    virtual: dict[str, Any],
    types: dict[str, Any] | None = None,
) -> str:
    document = {
        "physicalCluster": {"cellTypes": types or TYPES, "physicalCells": physical},
        "virtualClusters": virtual,
    }
    with pytest.raises(ConfigurationError) as caught:
        configuration_of(document)
    return str(caught.value)


def guarantee(**numbers: int) -> dict[str, Any]:
    paths = {"rack": "rack", "node": "rack.node", "switch": "rack.node.switch"}
    paths["gpu"] = "rack.node.switch.gpu"
    return {"virtualCells": [{"cellType": paths[k], "cellNumber": n} for k, n in numbers.items()]}


RACKS = [rack("n0", "n1"), rack("n2", "n3")]


@pytest.mark.parametrize(
    ("virtual", "level", "need", "available"),
    [
        ({"A": guarantee(rack=3)}, 4, 3, 2),
        ({"A": guarantee(rack=1), "B": guarantee(node=3)}, 3, 3, 2),
        ({"A": guarantee(node=4), "B": guarantee(gpu=1)}, 1, 1, 0),
        ({"A": guarantee(rack=1, switch=3), "B": guarantee(switch=2)}, 2, 5, 4),
        ({"A": guarantee(rack=1, node=1, switch=1), "B": guarantee(gpu=3)}, 1, 3, 2),
    ],
)
def test_guarantees_beyond_the_cluster_are_refused(
    virtual: dict[str, Any], level: int, need: int, available: int
) -> None:
    name = ("gpu", "switch", "node", "rack")[level - 1]
    assert refused(RACKS, virtual) == (
        f"Virtual clusters are promised {need} cells of level {level} ({name}) of chain rack, and "
        f"{available} are left when pinned cells and what is promised of higher levels are set "
        "aside."
    )


def test_pinned_cells_break_up_the_cells_around_them() -> None:
    """By count there are free cells: of each rack a quarter is pinned, and one is promised."""
    pinned = [
        {
            "cellType": "rack",
            "cellChildren": [
                {"cellAddress": f"n{rack}0", "cellChildren": [{"pinnedCellId": f"p{rack}"}, {}]},
                {"cellAddress": f"n{rack}1"},
            ],
        }
        for rack in range(2)
    ]
    pins = {"pinnedCells": [{"pinnedCellId": "p0"}, {"pinnedCellId": "p1"}]}
    message = refused(pinned, {"A": pins, "B": guarantee(rack=1)})
    assert "1 cells of level 4 (rack) of chain rack, and 0 are left" in message
    physical = {"cellTypes": TYPES, "physicalCells": pinned}
    configuration_of({"physicalCluster": physical, "virtualClusters": {"B": guarantee(rack=1)}})


@pytest.mark.parametrize(
    ("message", "physical", "virtual", "types"),
    [
        ("'n0' is declared twice", [rack("n0", "n1"), rack("n0", "n2")], {}, None),
        ("unknown type, 'tower'", [{"cellType": "tower"}], {}, None),
        ("has 1 children, and 2 by its type", [rack("n0")], {}, None),
        ("unknown key, 'cellAdress'", [{"cellType": "rack", "cellAdress": 1}], {}, None),
        ("cells of tower, and there is no such cell", RACKS, {"A": {"virtualCells": [
            {"cellType": "tower.node", "cellNumber": 1}]}}, None),
        ("cells of switch in rack", RACKS, {"A": {"virtualCells": [
            {"cellType": "rack.switch", "cellNumber": 1}]}}, None),
        ("is promised -1 cells", RACKS, {"A": guarantee(node=-1)}, None),
        ("'p', which is no cell", RACKS, {"A": {"pinnedCells": [{"pinnedCellId": "p"}]}}, None),
        ("'p' is promised twice", [rack("n0", "n1", pinnedCellId="p")], {
            "A": {"pinnedCells": [{"pinnedCellId": "p"}]},
            "B": {"pinnedCells": [{"pinnedCellId": "p"}]}}, None),
        ("Two cells have the pinned name 'p'", [
            rack("n0", "n1", pinnedCellId="p"), rack("n2", "n3", pinnedCellId="p")], {}, None),
        ("0 levels of nodes", [{"cellType": "a"}], {}, {
            "a": {"childCellType": "b", "childCellNumber": 2}}),
        ("a contains itself", [{"cellType": "a"}], {}, {
            "a": {"childCellType": "b", "childCellNumber": 2},
            "b": {"childCellType": "a", "childCellNumber": 2}}),
        ("needs a child type and a number", [{"cellType": "a"}], {}, {
            "a": {"childCellType": "b", "childCellNumber": 0}}),
    ],
)  # fmt: skip
def test_malformed_configurations_are_refused(
    message: str,
    physical: list[dict[str, Any]],
    virtual: dict[str, Any],
    types: dict[str, Any] | None,
) -> None:
    assert message in refused(physical, virtual, types)


def nodes(**sizes: int) -> dict[str, list[str]]:
    return {name: [f"{name}/gpu{i}" for i in range(size)] for name, size in sizes.items()}


def test_a_number_of_devices_is_guaranteed_in_large_cells() -> None:
    configuration = Configuration.of_nodes(nodes(a=8, b=8, c=6), {"A": 13, "B": 0, "C": 9})
    promised = {vc.name: vc.cells for vc in configuration.virtual_clusters}
    assert [level.leaves for level in configuration.chains[0].levels] == [1, 2, 4, 8]
    assert [level.leaves for level in configuration.chains[1].levels] == [1, 3, 6]
    eight, six = "node-of-8", "node-of-6"
    assert promised["A"] == (
        VirtualCellSpec(eight, 4, 1),
        VirtualCellSpec(eight, 3, 1),
        VirtualCellSpec(eight, 1, 1),
    )
    assert promised["B"] == ()
    assert promised["C"] == (
        VirtualCellSpec(eight, 2, 1),
        VirtualCellSpec(eight, 1, 1),
        VirtualCellSpec(six, 3, 1),
    )


def test_more_devices_than_there_are_cannot_be_guaranteed() -> None:
    with pytest.raises(ConfigurationError, match="promised 9 devices, and there are 8"):
        Configuration.of_nodes(nodes(a=4, b=4), {"A": 4, "B": 5})
    with pytest.raises(ConfigurationError, match="'a' has no devices"):
        Configuration.of_nodes(nodes(a=0, b=4), {"A": 4})


def leases(sizes: dict[str, int], guarantees: dict[str, int]) -> HivedGuarantees:
    return HivedGuarantees(Configuration.of_nodes(nodes(**sizes), guarantees))


def test_a_single_device_of_a_host_keeps_its_name() -> None:
    lease = HivedGuarantees(Configuration.of_nodes({"host": ["cpu:0"]}, {"A": 1}))
    assert lease.place("s", "A", 0, 1, []) == Bound(("cpu:0",), guaranteed=True)
    assert lease.free("A") == 0
    assert isinstance(lease.place("t", "A", 0, 1, []), NoPlacement)
    lease.release("s")
    assert lease.free("A") == 1


def test_a_guarantee_is_taken_back_from_opportunistic_groups() -> None:
    lease = leases({"a": 2, "b": 2}, {"A": 2, "B": 2})
    borrowed = [lease.place(f"s{i}", "A", -1, 1, []) for i in range(4)]
    assert all(isinstance(answer, Bound) and not answer.guaranteed for answer in borrowed)
    before = pictured(lease.cluster)
    answer = lease.place("t", "B", 0, 1, [])
    assert isinstance(answer, Victims)
    assert len(answer.requests) == 1
    (victim,) = answer.requests
    device = lease.cluster.devices[answer.devices[0]]
    assert device.state is CellState.RESERVING
    assert lease.cluster.state(victim) is GroupState.BEING_PREEMPTED
    # A repeated request has the same answer, and a cancelled one leaves no trace.
    assert lease.place("t", "B", 0, 1, []) == answer
    lease.cancel("t")
    assert pictured(lease.cluster) == before
    assert lease.place("t", "B", 0, 1, []) == answer
    lease.release(victim)
    assert lease.cluster.devices[answer.devices[0]].state is CellState.RESERVED
    # Other requests do not get what is reserved.
    assert isinstance(lease.place("u", "A", -1, 1, []), NoPlacement)
    assert lease.place("t", "B", 0, 1, []) == Bound(answer.devices, guaranteed=True)
    check(lease.cluster)


def test_a_guarantee_is_never_at_another_virtual_clusters_cost() -> None:
    lease = leases({"a": 2, "b": 2}, {"A": 2, "B": 2})
    for index in range(2):
        assert isinstance(lease.place(f"s{index}", "A", 0, 1, []), Bound)
    assert isinstance(lease.place("greedy", "A", 0, 1, []), NoPlacement)
    for index in range(2):
        assert isinstance(lease.place(f"t{index}", "B", 0, 1, []), Bound)
    answer = lease.place("important", "A", 1000, 1, [])
    assert isinstance(answer, Victims)
    assert answer.requests in (("s0",), ("s1",))


def test_a_lower_priority_becomes_opportunistic_while_there_is_room() -> None:
    lease = leases({"a": 2, "b": 2}, {"A": 2, "B": 2})
    first = lease.place("low", "A", 0, 2, [])
    assert isinstance(first, Bound)
    second = lease.place("high", "A", 1, 2, [])
    assert isinstance(second, Bound)
    assert set(first.devices).isdisjoint(second.devices)
    assert not lease.guaranteed("low")
    assert lease.guaranteed("high")
    # Now the other virtual cluster claims the devices, and the opportunistic group has to release
    # them.
    assert lease.place("theirs", "B", 0, 2, []) == Victims(first.devices, ("low",))


def test_a_cancelled_preemption_restores_its_victims_guarantee() -> None:
    lease = leases({"a": 2}, {"A": 2})
    lease.place("low", "A", 0, 2, [])
    assert isinstance(lease.place("high", "A", 1, 2, []), Victims)
    assert not lease.guaranteed("low")
    lease.cancel("high")
    assert lease.guaranteed("low")
    assert lease.cluster.state("low") is GroupState.ALLOCATED
    check(lease.cluster)


def test_preferred_devices_are_used_where_no_session_loses_by_it() -> None:
    lease = leases({"a": 4, "b": 4, "c": 4}, {"A": 4, "B": 4})
    assert lease.place("s0", "A", 0, 1, ["b/gpu2"]) == Bound(("b/gpu2",), guaranteed=True)
    # Its promise is one cell, which is bound to node b now.
    answer = lease.place("s1", "A", 0, 1, ["gone", "c/gpu1"])
    assert isinstance(answer, Bound)
    assert answer.devices[0].startswith("b/")
    assert lease.place("s2", "A", -1, 1, ["c/gpu1"]) == Bound(("c/gpu1",), guaranteed=False)
    # c/gpu1 would evict the group on it; a has room for the promise of B.
    answer = lease.place("t", "B", 0, 1, ["c/gpu1"])
    assert isinstance(answer, Bound)
    check(lease.cluster)


def test_guarantees_of_other_virtual_clusters_are_no_place_for_a_guarantee() -> None:
    lease = leases({"a": 4, "b": 4}, {"A": 4, "B": 4})
    assert isinstance(lease.place("s", "A", 0, 1, ["a/gpu0"]), Bound)
    answer = lease.place("t", "B", 0, 1, ["a/gpu1"])
    assert answer == Bound(("b/gpu0",), guaranteed=True)
    assert lease.place("u", "B", -1, 1, ["a/gpu1"]) == Bound(("a/gpu1",), guaranteed=False)
    check(lease.cluster)


def test_with_fewer_preferred_devices_than_needed_they_are_among_them() -> None:
    lease = leases({"a": 4, "b": 4}, {"A": 4, "B": 4})
    answer = lease.place("s", "A", 0, 2, ["b/gpu3"])
    assert isinstance(answer, Bound)
    assert sorted(answer.devices) == ["b/gpu2", "b/gpu3"]
    answer = lease.place("t", "B", -1, 2, ["a/gpu1"])
    assert isinstance(answer, Bound)
    assert "a/gpu1" in answer.devices


def test_a_necessary_preemption_is_on_the_preferred_device() -> None:
    lease = leases({"a": 1, "b": 1, "c": 1}, {"A": 1})
    for name in ("a", "b", "c"):
        lease.place(name, "A", -1, 1, [f"{name}/gpu0"])
    assert lease.place("s", "A", 0, 1, ["b/gpu0"]) == Victims(("b/gpu0",), ("b",))


def test_groups_stay_while_a_larger_cell_can_be_split() -> None:
    lease = leases({"a": 2, "b": 2}, {"A": 1, "B": 1, "C": 1})
    lease.place("s", "A", 0, 1, ["a/gpu0"])
    lease.place("t", "C", -1, 1, ["a/gpu1"])
    answer = lease.place("u", "B", 0, 1, [])
    assert answer == Bound(("b/gpu0",), guaranteed=True)


def test_devices_of_a_lease_are_near_each_other() -> None:
    lease = leases({"a": 8}, {"A": 8})
    lease.place("one", "A", 0, 1, ["a/gpu2"])
    four = lease.place("four", "A", 0, 4, [])
    two = lease.place("two", "A", 0, 2, [])
    assert isinstance(four, Bound)
    assert isinstance(two, Bound)
    assert sorted(four.devices) == [f"a/gpu{i}" for i in range(4, 8)]
    assert sorted(two.devices) == ["a/gpu0", "a/gpu1"]


def test_bad_devices_are_left_out_and_the_rest_of_their_node_is_not() -> None:
    lease = leases({"a": 4}, {"A": 4})
    lease.set_health("a/gpu1", good=False)
    assert lease.free("A") == 3
    assert isinstance(lease.place("four", "A", 0, 4, []), NoPlacement)
    answer = lease.place("three", "A", 0, 3, [])
    assert isinstance(answer, Bound)
    assert "a/gpu1" not in answer.devices
    assert lease.free("A") == 0
    lease.set_health("a", good=False)
    lease.set_health("a", good=True)
    assert lease.free("A") == 0, "the device was bad by itself"
    lease.set_health("a/gpu1", good=True)
    assert lease.free("A") == 1
    check(lease.cluster)


def test_a_reservation_moves_when_its_device_breaks() -> None:
    lease = leases({"a": 1, "b": 1}, {"A": 1})
    lease.place("s", "A", -1, 1, ["a/gpu0"])
    lease.place("t", "A", -1, 1, ["b/gpu0"])
    answer = lease.place("u", "A", 0, 1, ["a/gpu0"])
    assert answer == Victims(("a/gpu0",), ("s",))
    lease.set_health("a", good=False)
    assert lease.place("u", "A", 0, 1, ["a/gpu0"]) == Victims(("b/gpu0",), ("t",))
    assert lease.cluster.state("s") is GroupState.ALLOCATED


def test_requests_that_make_no_sense_are_refused() -> None:
    lease = leases({"a": 4}, {"A": 4})
    before = pictured(lease.cluster)
    with pytest.raises(RequestError, match="priority 1001"):
        lease.place("s", "A", 1001, 1, [])
    with pytest.raises(RequestError, match="asks for no devices"):
        lease.place("s", "A", 0, 0, [])
    with pytest.raises(RequestError, match="holds nothing"):
        lease.guaranteed("s")
    with pytest.raises(RequestError, match="neither a device nor a node 'x'"):
        lease.set_health("x", good=False)
    assert lease.place("s", "A", 0, 5, []) == NoPlacement(
        "A is promised no 5 devices together; 4 at most."
    )
    assert pictured(lease.cluster) == before


def test_a_guarantee_lost_to_a_reservation_returns_when_that_is_overtaken() -> None:
    lease = leases({"a": 4}, {"A": 4})
    for index in range(2):
        lease.place(f"low{index}", "A", 0, 1, [f"a/gpu{index}"])
    lease.place("two", "A", 0, 2, [])
    answer = lease.place("high", "A", 1, 4, [])
    assert isinstance(answer, Victims)
    assert set(answer.requests) == {"low0", "low1", "two"}
    assert not lease.guaranteed("two")
    answer = lease.place("higher", "A", 2, 1, [])
    assert answer == Victims(("a/gpu0",), ("low0",))
    assert lease.cluster.state("high") is GroupState.PENDING
    assert lease.guaranteed("two")
    assert lease.guaranteed("low1")
    check(lease.cluster)
    lease.cancel("higher")
    assert lease.guaranteed("low0")
    check(lease.cluster)
    # The same, if the device that is taken over is free by then.
    answer = lease.place("high", "A", 1, 4, [])
    assert isinstance(answer, Victims)
    lease.release("low0")
    assert lease.place("higher", "A", 2, 1, []) == Bound(("a/gpu0",), guaranteed=True)
    assert lease.guaranteed("two")
    assert lease.guaranteed("low1")
    check(lease.cluster)


def test_the_lowest_priorities_lose_a_reduced_guarantee() -> None:
    lease = leases({"a": 1, "b": 1}, {"A": 2})
    lease.place("low", "A", 0, 1, [])
    lease.place("high", "A", 1, 1, [])
    changes = lease.reconfigure(Configuration.of_nodes(nodes(a=1, b=1), {"A": 1}))
    assert changes.downgraded == ("low",)
    assert lease.guaranteed("high")
    check(lease.cluster)


def test_groups_without_a_guarantee_can_be_opportunistic() -> None:
    lease = leases({"a": 2}, {"A": 1})
    assert lease.free("B") == 0
    assert lease.place("s", "B", 0, 1, []) == NoPlacement("B is promised no such devices.")
    assert lease.place("s", "B", -1, 1, ["a/gpu1"]) == Bound(("a/gpu1",), guaranteed=False)
    lease.release("s")
    lease.release("s")
    lease.cancel("s")
    assert isinstance(lease.place("t", "A", 0, 1, []), Bound)
    with pytest.raises(RequestError, match="no reservation"):
        lease.cancel("t")
    check(lease.cluster)


@pytest.mark.parametrize("priority", [-1, 0])
def test_several_preferred_devices_are_all_used(priority: int) -> None:
    """As when the engine has emptied just these for a session."""
    lease = leases({"a": 4, "b": 4}, {"A": 4, "B": 3})
    wanted = ("b/gpu1", "b/gpu2")  # in different halves of the node
    answer = lease.place("s", "A", priority, 2, wanted)
    assert answer == Bound(wanted, guaranteed=priority == 0)
    # 3 devices are promised as 2 + 1; if they happen to be on one node, that is accepted.
    three = ("a/gpu0", "a/gpu2", "a/gpu3")
    if priority == 0:
        assert lease.place("t", "B", 0, 3, three) == Bound(three, guaranteed=True)
        check(lease.cluster)
        assert lease.free("B") == 0
        assert lease.reconfigure(lease.cluster.configuration).downgraded == ()
        lease.release("t")
        assert isinstance(lease.place("u", "B", 0, 3, ["a/gpu0"]), NoPlacement)
        assert isinstance(lease.place("u", "B", 0, 3, ["a/gpu0", "a/gpu2", "b/gpu3"]), NoPlacement)
    check(lease.cluster)


def test_another_configuration_leaves_everybody_where_they_are() -> None:
    lease = leases({"a": 2, "b": 2}, {"A": 2, "B": 1})
    held = {
        "s": lease.place("s", "A", 1, 1, ["a/gpu0"]),
        "t": lease.place("t", "A", 0, 1, []),
        "u": lease.place("u", "B", 0, 1, []),
    }
    assert all(isinstance(answer, Bound) and answer.guaranteed for answer in held.values())
    changes = lease.reconfigure(Configuration.of_nodes(nodes(a=2, b=2), {"A": 2, "C": 1}))
    assert (changes.downgraded, changes.lost, changes.cancelled) == (("u",), (), ())
    for name, answer in held.items():
        assert isinstance(answer, Bound)
        seats = lease.cluster.groups[name].seats
        assert tuple(seat.physical.device for seat in seats) == answer.devices
    check(lease.cluster)
    changes = lease.reconfigure(Configuration.of_nodes(nodes(a=2, b=2), {"A": 1}))
    assert changes.downgraded == ("t",)
    assert lease.guaranteed("s"), "of a smaller cell now"
    changes = lease.reconfigure(Configuration.of_nodes(nodes(b=2), {"A": 1}))
    assert set(changes.lost) == {"s", "t"}
    lease.release("s")
    check(lease.cluster)


def test_a_preference_does_not_break_up_what_others_are_guaranteed() -> None:
    sizes, promises = {"a": 2, "b": 2}, {"A": 1, "C": 1}
    free = leases(sizes, promises)
    tight = leases(sizes, promises | {"B": 2})
    for lease, device in ((free, "b/gpu0"), (tight, "a/gpu1")):
        assert lease.place("s", "A", 0, 1, ["a/gpu0"]) == Bound(("a/gpu0",), guaranteed=True)
        assert lease.place("t", "C", 0, 1, ["b/gpu0"]) == Bound((device,), guaranteed=True)
        check(lease.cluster)
    # They are on both nodes, and the new configuration promises one node as a whole.
    changes = free.reconfigure(tight.cluster.configuration)
    assert changes.downgraded == ("t",)
    assert isinstance(free.place("u", "B", 0, 2, []), Victims)
    check(free.cluster)


def test_groups_of_the_same_or_a_higher_priority_keep_the_guarantee() -> None:
    lease = leases({"a": 4}, {"A": 4})
    lease.place("high", "A", 5, 3, [])
    lease.place("low", "A", 0, 1, [])
    assert isinstance(lease.place("two", "A", 5, 2, []), NoPlacement)
    assert lease.place("one", "A", 5, 1, []) == Victims(("a/gpu3",), ("low",))


def test_a_preferred_device_is_worth_splitting_a_larger_cell() -> None:
    lease = leases({"a": 4, "b": 4}, {"A": 2, "B": 1})
    lease.place("s", "B", 0, 1, ["a/gpu0"])
    answer = lease.place("t", "A", 0, 2, ["b/gpu3"])
    assert isinstance(answer, Bound)
    assert "b/gpu3" in answer.devices
    check(lease.cluster)


def test_siblings_are_assigned_so_that_all_fit() -> None:
    """The first would take the better node, but only the second one depends on it."""
    document = {
        "physicalCluster": {"cellTypes": TYPES, "physicalCells": [rack("n0", "n1")]},
        "virtualClusters": {"A": guarantee(rack=1)},
    }
    cluster = HivedCluster(configuration_of(document))
    for device in ("n0/0", "n0/2"):
        cluster.set_health(device, good=False)
    first, second = cluster.virtual_cluster("A").holdings["rack"].nodes
    wanted = [first.devices[0], first.devices[2], second.devices[0], second.devices[1]]
    found = Mapper(cluster.pools["rack"], None, Favour(())).map(wanted)
    assert found is not None
    assert [found[device].device for device in wanted] == ["n0/1", "n0/3", "n1/0", "n1/1"]
    check(cluster)
