"""The engine with real guarantees: cells, virtual clusters, preemption of borrowed devices."""

from __future__ import annotations

import pytest

from jupyter_sing.scheduler.decisions import Grant, Preempt
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.leases import HivedGuarantees
from jupyter_sing.scheduler.settings import DeviceSpec, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9


def departments(promised: dict[str, int], count: int = 4) -> FakeController:
    names = [f"node0/gpu{index}" for index in range(count)]
    devices = [DeviceSpec(name, 24 * GB) for name in names]
    guarantees = HivedGuarantees(Configuration.of_nodes({"node0": names}, promised))
    return FakeController(Engine(devices, guarantees=guarantees), devices, delay=0.01)


def fill(host: FakeController, vc: str, count: int, tier: Tier = Tier.STANDARD) -> None:
    for index in range(count):
        host.open(f"{vc}{index}", GB, vc=vc, user=f"{vc}{index}", tier=tier)
        host.submit(f"{vc}{index}", 100_000.0)


def test_unused_guarantees_are_lent() -> None:
    host = departments({"physics": 2, "biology": 2})
    fill(host, "physics", 4)
    host.run_until(10.0)
    assert all(host.holders[device] for device in host.devices)


@pytest.mark.parametrize("tier", [Tier.PREMIUM, Tier.BASIC])
def test_a_guarantee_is_served_at_once_whatever_others_do(tier: Tier) -> None:
    host = departments({"physics": 2, "biology": 2})
    fill(host, "physics", 6, tier)
    host.run_until(50.0)
    fill(host, "biology", 2, Tier.BASIC)
    host.run_until(60.0)
    waits = [wait for name, wait in host.waits if name.startswith("biology")]
    assert len(waits) == 2
    assert max(waits) < 1.0
    host.run_until(600.0)
    service = sum(host.served(f"biology{index}") for index in range(2))
    assert service > 2 * (600.0 - 60.0)


def test_guaranteed_cells_are_no_victims_of_other_clusters() -> None:
    host = departments({"physics": 2, "biology": 2})
    fill(host, "biology", 2, Tier.BASIC)
    host.run_until(300.0)
    fill(host, "physics", 5, Tier.PREMIUM)
    host.run_until(900.0)
    stopped = [d.session for _, d in host.decided if isinstance(d, Preempt)]
    assert not any(name.startswith("biology") for name in stopped)


def test_sessions_of_a_cluster_take_turns_on_its_guarantee() -> None:
    host = departments({"physics": 1, "biology": 1}, count=2)
    fill(host, "physics", 2, Tier.BASIC)
    fill(host, "biology", 1, Tier.BASIC)
    host.run_until(3000.0)
    shares = [host.served(f"physics{index}") for index in range(2)]
    assert abs(shares[0] - shares[1]) <= 320.0
    assert host.served("biology0") > 2990.0


def test_all_devices_at_once_come_from_a_guarantee() -> None:
    host = departments({"physics": 4})
    fill(host, "guests", 4, Tier.BASIC)
    host.run_until(100.0)
    host.open("wide", GB, vc="physics", gpus=4)
    host.submit("wide", 10.0)
    host.run_until(150.0)
    (grant,) = [d for _, d in host.decided if isinstance(d, Grant) and d.session == "wide"]
    assert sorted(grant.devices) == sorted(host.devices)
    assert host.served("wide") == pytest.approx(10.0)
