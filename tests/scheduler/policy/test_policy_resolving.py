"""Resolution of a user's terms under a policy, and the line that decides each."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from jupyter_sing.scheduler.policy import Policy, Resolver, parse, resolve
from tests.scheduler.policy_strategies import STEADY, policies, users

POLICY = parse(
    """\
tiers:
  basic: {suspend_after: 1 min}
defaults:
  weight: 3
  quotas: {disk: 10 GiB, devices: 5}
others: {virtual_cluster: beta, tier: basic}
virtual_clusters:
  alpha:
    weight: 2
    each: {tier: premium, quotas: {devices: 4}}
    users:
      - ada
      - {name: bob, weight: 7, quotas: {devices: unlimited}}
      - {name: "s-*", weight: 5}
      - {name: "s-1*", weight: 6}
    groups:
      night:
        members: [bob, s-12, "n?"]
        tier: standard
        weight: 9
        packing: true
      early:
        members: ["*2"]
        tier: basic
  beta:
    guaranteed_devices: 0
    quotas: {devices: 9}
    each: {packing: true}
    users: ["s-9", "[xy]*"]
"""
)

TERMS = {
    # user: virtual cluster, group, tier, weight, packing, devices, disk
    "ada": ("alpha", None, "premium", 3, False, 4, 10),  # each overrides defaults
    "bob": ("alpha", "night", "standard", 7, True, math.inf, 10),  # an entry overrides the group
    "s-5": ("alpha", None, "premium", 5, False, 4, 10),
    "s-10": ("alpha", None, "premium", 5, False, 4, 10),  # the first pattern
    "s-12": ("alpha", "night", "standard", 9, True, 4, 10),  # a member's name before a pattern
    "s-22": ("alpha", "early", "basic", 5, False, 4, 10),  # both by pattern: an entry wins
    "s-9": ("beta", None, "standard", 3, True, 5, 10),  # a name before a pattern elsewhere
    "n7": ("alpha", "night", "standard", 9, True, 4, 10),
    "n42": ("alpha", "early", "basic", 3, False, 4, 10),
    "N7": ("beta", None, "basic", 3, True, 5, 10),  # names are taken literally
    "xenia": ("beta", None, "standard", 3, True, 5, 10),
    "eve": ("beta", None, "basic", 3, True, 5, 10),  # others overrides each
    "s-*": ("alpha", None, "premium", 5, False, 4, 10),  # what a pattern would set
    "s-1*": ("alpha", None, "premium", 6, False, 4, 10),
}


@pytest.mark.parametrize("user", TERMS)
def test_the_nearest_decides(user: str) -> None:
    found = resolve(POLICY, user)
    assert (
        found.virtual_cluster,
        found.group,
        found.tier,
        found.weight,
        found.packing,
        found.quotas.devices,
        found.quotas.disk / (1 << 30),
    ) == TERMS[user]


def decided(user: str) -> dict[str, tuple[str | None, int | None]]:
    return {each.key: (each.path, each.line) for each in resolve(POLICY, user).decided}


def test_resolved_terms_name_the_deciding_line() -> None:
    alpha = "virtual_clusters.alpha"
    assert decided("bob") == {
        "virtual_cluster": (f"{alpha}.users[1]", 13),
        "tier": (f"{alpha}.groups.night.tier", 19),
        "weight": (f"{alpha}.users[1].weight", 13),
        "packing": (f"{alpha}.groups.night.packing", 21),
        "quotas.devices": (f"{alpha}.users[1].quotas.devices", 13),
        "quotas.device_memory": (None, None),
        "quotas.gpu_hours_per_day": (None, None),
        "quotas.disk": ("defaults.quotas.disk", 5),
        "gpu_percent": (None, None),
        "suspend_after": (None, None),
        "hibernate_after": (None, None),
        "max_hold": (None, None),
    }
    assert decided("s-12")["virtual_cluster"] == (f"{alpha}.groups.night.members[1]", 18)
    assert decided("eve")["virtual_cluster"] == ("others.virtual_cluster", 6)
    assert decided("eve")["tier"] == ("others.tier", 6)
    assert decided("eve")["suspend_after"] == ("tiers.basic.suspend_after", 2)


def test_a_virtual_cluster_has_quotas_of_its_own() -> None:
    assert resolve(POLICY, "eve").cluster_quotas.devices == 9
    assert resolve(POLICY, "ada").cluster_quotas.devices == math.inf
    assert resolve(POLICY, "ada").cluster_weight == 2


def test_the_virtual_cluster_default_can_be_described() -> None:
    policy = parse("virtual_clusters: {default: {weight: 4, each: {tier: basic}}}")
    found = resolve(policy, "anybody")
    assert (found.virtual_cluster, found.cluster_weight, found.tier) == ("default", 4, "basic")


@settings(STEADY, max_examples=30)
@given(policies(), users)
def test_all_users_get_terms_and_every_line_exists(policy: Policy, user: str) -> None:
    resolver = Resolver(policy)
    for name in (user, *(u.name for vc in policy.virtual_clusters for u in vc.users)):
        found = resolver.resolve(name)
        assert found == resolve(policy, name)
        assert found.weight > 0
        assert found.terms.hibernate_after >= found.terms.suspend_after
        assert len({each.key for each in found.decided}) == len(found.decided) == 12
