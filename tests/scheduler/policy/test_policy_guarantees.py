"""Guarantees of a policy become the guarantees of the engine."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler.hived import ConfigurationError, HivedGuarantees
from jupyter_sing.scheduler.policy import PolicyError, configuration, parse
from jupyter_sing.scheduler.policy.model import DEVICES_MAX
from tests.scheduler.policy_strategies import EXAMPLES


def test_devices_are_guaranteed_on_the_hosts_that_the_policy_counts() -> None:
    found = configuration(parse(EXAMPLES["course"]))
    assert found is not None
    leases = HivedGuarantees(found)
    assert {vc.name: leases.free(vc.name) for vc in found.virtual_clusters} == {
        "teaching": 2,
        "course": 0,
        "default": 0,  # which is not described, with names that are used elsewhere
    }
    nodes = [cell.node for cell in found.cells]
    assert nodes == ["host0", "host1"]


def test_devices_are_guaranteed_on_the_hosts_that_there_are() -> None:
    policy = parse(EXAMPLES["course"])
    here = {"here": ["cpu:0", "cpu:1"]}
    found = configuration(policy, here)
    assert found is not None
    assert HivedGuarantees(found).free("teaching") == 2
    with pytest.raises(ConfigurationError, match="promised 2 devices, and there are 1"):
        configuration(policy, {"here": ["cpu:0"]})


def test_cells_are_guaranteed_by_level() -> None:
    found = configuration(parse(EXAMPLES["departments"]))
    assert found is not None
    leases = HivedGuarantees(found)
    assert (leases.free("physics"), leases.free("biology")) == (16, 12)


def test_a_policy_without_devices_needs_them_from_the_caller() -> None:
    policy = parse(EXAMPLES["laptop"])
    assert configuration(policy) is None
    found = configuration(policy, {"here": ["cuda:0"]})
    assert found is not None
    assert [vc.name for vc in found.virtual_clusters] == ["default"]


@pytest.mark.parametrize("given", [[4], [1, 1, 1, 1], [0, 4, 0], [3, 0, 1]])
def test_all_devices_can_be_guaranteed_and_no_more(given: list[int]) -> None:
    def text(counts: list[int]) -> str:
        clusters = (f"  vc{i}: {{guaranteed_devices: {n}}}" for i, n in enumerate(counts))
        return "\n".join(("cluster: {hosts: 2, devices_per_host: 2}\nvirtual_clusters:", *clusters))

    assert len(parse(text(given)).virtual_clusters) == len(given)
    for index in range(len(given)):
        more = [count + (i == index) for i, count in enumerate(given)]
        last = max(i for i, count in enumerate(more) if count)
        with pytest.raises(PolicyError, match="promised 5 devices, and there are 4") as caught:
            parse(text(more))
        assert caught.value.path == f"virtual_clusters.vc{last}"
        assert caught.value.line == last + 3


def test_the_largest_cluster_is_a_cluster() -> None:
    policy = parse(f"cluster: {{hosts: {DEVICES_MAX // 8}, devices_per_host: 8}}")
    found = configuration(policy)
    assert found is not None
    assert len(found.cells) == DEVICES_MAX // 8
