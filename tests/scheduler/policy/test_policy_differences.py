"""The users that a changed policy affects, listed before it is applied."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from jupyter_sing.scheduler.policy import Policy, SessionUse, differences, parse
from tests.scheduler.policy_strategies import EXAMPLES, STEADY, policies

HEAD = "cluster: {devices_per_host: 4}\n"


def vision(inside: str) -> str:
    return f"{HEAD}virtual_clusters: {{vision: {{{inside}}}}}"


def running(user: str, devices: int = 1) -> SessionUse:
    return SessionUse(user, running=True, devices=devices)


def resting(user: str, memory: int = 0) -> SessionUse:
    return SessionUse(user, running=False, device_memory=memory)


MANY = ", ".join(f"s{i}" for i in range(8))

CASES: dict[str, tuple[str, str, list[SessionUse], list[str]]] = {
    "nothing": (vision("users: [ada]"), vision("users: [ada]"), [running("ada")], []),
    "another tier": (
        vision("users: [ada]"),
        vision("users: [{name: ada, tier: basic}]"),
        [running("ada"), running("ada"), resting("ada")],
        ["ada (vision): tier standard -> basic; 2 running sessions keep their cells"],
    ),
    "a tier that means something else": (
        "{}",
        "tiers: {standard: {suspend_after: 2 min, gpu_percent: 50}}",
        [resting("bob"), running("ada")],
        [
            "ada (default): guaranteed GPU time 70 % -> 50 %; suspended after 10 min -> 2 min; "
            "1 running session keeps its cell",
            "bob and others (default): guaranteed GPU time 70 % -> 50 %; suspended after 10 min -> "
            "2 min",
        ],
    ),
    "into a virtual cluster": (
        HEAD,
        vision("guaranteed_devices: 2, users: [ada]"),
        [running("ada")],
        [
            "virtual cluster vision: new, guaranteed 2 devices",
            "ada: virtual cluster default -> vision; 1 running session keeps its cell",
        ],
    ),
    "out of one": (
        vision("guaranteed_devices: 2, users: [ada], each: {packing: true}"),
        HEAD,
        [],
        [
            "virtual cluster vision: gone, with 2 devices guaranteed",
            "ada: virtual cluster vision -> default; packing allowed -> not allowed",
        ],
    ),
    "the virtual cluster itself": (
        vision("guaranteed_devices: 2, weight: 2, users: [ada]"),
        vision("guaranteed_devices: 1, quotas: {devices: 3}, users: [ada]"),
        [running("ada")],
        [
            "virtual cluster vision: guaranteed 2 devices -> 1 device; weight 2 -> 1; "
            "all together unlimited -> devices at once 3"
        ],
    ),
    "what there is": (
        "cluster: {devices_per_host: 4}",
        "cluster: {hosts: 2, devices_per_host: 4}",
        [],
        ["cluster: 1 host of 4 devices -> 2 hosts of 4 devices"],
    ),
    "when jobs grow": (
        "jobs: {grow_after: 0 s}",
        "jobs: {grow_after: never}",
        [running("ada")],
        ["jobs: grow onto idle devices after 0 s -> never"],
    ),
    "when jobs grow, as built in": ("{}", "jobs: {grow_after: 30 s}", [running("ada")], []),
    "less than somebody has": (
        "defaults: {quotas: {devices: 4, device_memory: 24 GiB}}",
        "defaults: {quotas: {devices: 2, device_memory: 24 GiB}}",
        [running("ada", 3), running("bob", 2)],
        [
            "ada (default): devices at once 4 -> 2; 1 running session keeps its cell; has 3 "
            "devices now, and gets no more until that is within the quota",
            "bob (default): devices at once 4 -> 2; 1 running session keeps its cell",
            "others (default): devices at once 4 -> 2",
        ],
    ),
    "less memory than somebody has": (
        "{}",
        "defaults: {quotas: {device_memory: 1 GiB}}",
        [resting("ada", 1 << 30), resting("ada", 5)],
        [
            "ada (default): device memory unlimited -> 1 GiB; has 1025 MiB of device memory now, "
            "and gets no more until that is within the quota",
            "others (default): device memory unlimited -> 1 GiB",
        ],
    ),
    "a quota that was exceeded before": (
        "defaults: {quotas: {devices: 1}}",
        "defaults: {quotas: {devices: 1}, weight: 2}",
        [running("ada", 3)],
        [
            "ada (default): weight 1 -> 2; 1 running session keeps its cell",
            "others (default): weight 1 -> 2",
        ],
    ),
    "strangers are turned away": (
        "{}",
        "others: {admitted: false}",
        [running("ada"), resting("bob")],
        [
            "ada (default): not admitted any more; 1 running session keeps its cell",
            "bob and others (default): not admitted any more",
        ],
    ),
    "and admitted again": (
        "others: {admitted: false}",
        "others: {tier: basic}",
        [],
        ["others (default): admitted; tier standard -> basic"],
    ),
    "many at once": (
        vision(f"users: [ada], groups: {{students: {{members: [{MANY}, 'x*']}}}}"),
        vision(
            f"users: [ada], groups: {{students: {{members: [{MANY}, 'x*'], weight: 2, "
            "quotas: {gpu_hours_per_day: 1.5}}}"
        ),
        [running("s3"), running("xaver")],
        [
            "s3 (vision): weight 1 -> 2; GPU-hours a day unlimited -> 1.5; 1 running session keeps "
            "its cell",
            "xaver (vision): weight 1 -> 2; GPU-hours a day unlimited -> 1.5; 1 running session "
            "keeps its cell",
            "s0, s1, s2, s4, s5 and 3 more (vision): weight 1 -> 2; GPU-hours a day unlimited -> "
            "1.5",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_differences_list_affected_users_and_effects(case: str) -> None:
    old, new, sessions, expected = CASES[case]
    found = differences(parse(old), parse(new), sessions)
    assert [str(each) for each in found] == expected


@settings(STEADY, max_examples=25)
@given(policies(), policies())
def test_no_change_is_reported_and_every_change_can_be(old: Policy, new: Policy) -> None:
    sessions = [running("ada"), resting("no")]
    assert differences(old, old, sessions) == ()
    there, back = differences(old, new, sessions), differences(new, old, sessions)
    assert bool(there) == bool(back)
    assert all(str(each).isprintable() for each in there)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_no_other_policy_than_itself(example: str) -> None:
    assert differences(parse(EXAMPLES[example]), parse(EXAMPLES[example]), [running("ada")]) == ()
