"""Policy documents: errors and their messages, and lossless writing."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings

from jupyter_sing.scheduler.policy import Policy, PolicyError, dump, parse
from jupyter_sing.scheduler.policy.yaml_reader import (
    DEPTH_MAX,
    SCALAR_CHARACTERS_MAX,
    TEXT_BYTES_MAX,
    VALUES_MAX,
)
from jupyter_sing.scheduler.settings import Tier
from tests.scheduler.policy_strategies import EXAMPLES, STEADY, policies

VISION = "virtual_clusters: {vision: %s}"
HOSTS = "cluster: {devices_per_host: 4}\n"
CELLS = """\
cluster:
  cell_types:
    node: {child_cell_type: gpu, child_cell_number: 2, is_node_level: true}
    rack: {child_cell_type: node, child_cell_number: 3}
"""
PINNED = "[{pinned_cell_id: mine}, {}, {}]"
RACK = f"{CELLS}  physical_cells: [{{cell_type: rack, cell_children: {PINNED}}}]\n"

REFUSED = {
    # No valid YAML document.
    "": "policy: is empty; a policy that says nothing special is {}",
    "# nothing\n": "policy: is empty; a policy that says nothing special is {}",
    "---\n": "policy: must be keys (cluster, tiers, jobs, defaults, others, virtual_clusters), "
    "not empty (line 2)",
    "[tiers]": "policy: must be keys (cluster, tiers, jobs, defaults, others, virtual_clusters), "
    "not a list (line 1)",
    "a: {": "policy: is not YAML: expected the node content, but found '<stream end>' (line 1)",
    "defaults:\n\t- a": "policy: is not YAML: found character '\\\\t' that cannot start any token "
    "(line 2)",
    "{}\n---\n{}": "policy: has a second document (---); one is allowed (line 2)",
    "tiers: \x07": "policy: has characters that are not allowed in YAML (line 1)",
    # Keys.
    "virtual_cluster: {}": "virtual_cluster: is no key here; did you mean virtual_clusters? "
    "(line 1)",
    VISION % "{users: [ada, bob, {name: eve, wieght: 2}]}": "virtual_clusters.vision.users[2]"
    ".wieght: is no key here; did you mean weight? (line 1)",
    "defaults: {zzz: 1}": "defaults.zzz: is no key here; allowed: tier, weight, packing, quotas "
    "(line 1)",
    "defaults: {'a b': 1}": "defaults.'a b': is no key here; allowed: tier, weight, packing, "
    "quotas (line 1)",
    "defaults:\n  tier: basic\n  tier: premium": "defaults.tier: is there twice; it is in line 2 "
    "already (line 3)",
    "? [a]\n: b": "policy: has a key that is no word (line 1)",
    "tiers: {gold: {}}": "tiers.gold: is no key here; allowed: premium, standard, basic (line 1)",
    VISION % "{users: [{tier: basic}]}": "virtual_clusters.vision.users[0].name: is missing "
    "(line 1)",
    VISION % "{groups: {g: {tier: basic}}}": "virtual_clusters.vision.groups.g.members: is "
    "missing (line 1)",
    "virtual_clusters: {a.b: {}}": "virtual_clusters.'a.b': must have for a name a name of at "
    "most 60 letters, digits, - and _ (line 1)",
    # Values.
    VISION % "{users: [ada, bob, {name: eve, weight: -1}]}": "virtual_clusters.vision.users[2]"
    ".weight: must be above 0 (0.001 to 1000), not -1 (line 1)",
    "defaults: {weight: 0}": "defaults.weight: must be above 0 (0.001 to 1000), not 0 (line 1)",
    "defaults: {weight: 1e-9}": "defaults.weight: must be a number from 0.001 to 1000, not 1e-9 "
    "(line 1)",
    "defaults: {weight: .nan}": "defaults.weight: must be a number from 0.001 to 1000, not .nan "
    "(line 1)",
    "defaults: {weight: 1e999}": "defaults.weight: must be a number from 0.001 to 1000, "
    "not 1e999 (line 1)",
    "defaults: {weight: '2'}": "defaults.weight: must be a number from 0.001 to 1000, not '2' "
    "(line 1)",
    "defaults: {weight: true}": "defaults.weight: must be a number from 0.001 to 1000, not true "
    "(line 1)",
    "defaults: {weight: }": "defaults.weight: must be a number from 0.001 to 1000, not empty "
    "(line 1)",
    "defaults: {tier: gold}": "defaults.tier: must be premium, standard or basic, not 'gold' "
    "(line 1)",
    "defaults: {tier: [basic]}": "defaults.tier: must be premium, standard or basic, not a list "
    "(line 1)",
    "defaults: {packing: no}": "defaults.packing: must be true or false, not 'no' (line 1)",
    "defaults: {quotas: {devices: 1.5}}": "defaults.quotas.devices: must be a whole number from 0 "
    "to 10000, or unlimited, not 1.5 (line 1)",
    "defaults: {quotas: {devices: never}}": "defaults.quotas.devices: must be a whole number from "
    "0 to 10000, or unlimited, not 'never' (line 1)",
    "defaults: {quotas: {disk: 5 GB}}": "defaults.quotas.disk: must be a whole number with a unit "
    "(MiB, GiB, TiB), such as 24 GiB, or unlimited, not '5 GB' (line 1)",
    "defaults: {quotas: {disk: 5}}": "defaults.quotas.disk: must be a whole number with a unit "
    "(MiB, GiB, TiB), such as 24 GiB, or unlimited, not 5 (line 1)",
    "tiers: {basic: {suspend_after: 1.5 h}}": "tiers.basic.suspend_after: must be a whole number "
    "with a unit (s, min, h, d), such as 10 min, or never, not '1.5 h' (line 1)",
    "tiers: {basic: {suspend_after: 0 s}}": "tiers.basic.suspend_after: must be a whole number "
    "with a unit (s, min, h, d), such as 10 min, or never, not '0 s' (line 1)",
    "tiers: {basic: {max_hold: never}}": "tiers.basic.max_hold: must be a whole number with a "
    "unit (s, min, h, d), such as 10 min, or unlimited, not 'never' (line 1)",
    "tiers: {premium: {gpu_percent: 100}}": "tiers.premium.gpu_percent: must be a number from 0 "
    "to 99, not 100 (line 1)",
    VISION % "[]": "virtual_clusters.vision: must be keys (guaranteed_devices, guaranteed_cells, "
    "pinned_cells, weight, quotas, each, users, groups), not a list (line 1)",
    VISION % "{users: ada}": "virtual_clusters.vision.users: must be a list, not 'ada' (line 1)",
    VISION % "{users: [' ada']}": "virtual_clusters.vision.users[0]: must be the name of a user, "
    "or a pattern such as s-*, not ' ada' (line 1)",
    VISION % "{users: [True]}": "virtual_clusters.vision.users[0]: must be the name of a user, "
    "or a pattern such as s-*: write 'True' in quotes (line 1)",
    VISION % "{groups: {g: {members: []}}}": "virtual_clusters.vision.groups.g.members: must have "
    "1 items or more, not 0 (line 1)",
    VISION % '{users: ["a\\u202eb"]}': "virtual_clusters.vision.users[0]: must be one line of "
    "printable characters, not 'a\\u202eb' (line 1)",
    "defaults: {tier: |\n basic\n}": "policy: is not YAML: found character '|' that cannot "
    "start any token (line 1)",
    # Contradictions.
    "tiers:\n  basic: {gpu_percent: 80}": "tiers.basic.gpu_percent: must be at most 70, as that "
    "of standard is (line 2)",
    "tiers:\n  premium: {gpu_percent: 50}": "tiers.premium.gpu_percent: must be at least 70, as "
    "that of standard is (line 2)",
    "tiers: {basic: {hibernate_after: 1 min}}": "tiers.basic.hibernate_after: must not be earlier "
    "than suspend_after, which is 10 min (line 1)",
    "tiers: {basic: {hibernate_after: 1 h, suspend_after: never}}": "tiers.basic.hibernate_after: "
    "must not be earlier than suspend_after, which is never (line 1)",
    "others: {virtual_cluster: guests}": "others.virtual_cluster: must be one of virtual_clusters "
    "(there are none) (line 1)",
    f"others: {{virtual_cluster: guests}}\n{VISION % '{}'}": "others.virtual_cluster: must be one "
    "of virtual_clusters (vision) (line 1)",
    "others: {admitted: false, tier: basic}": "others.tier: means nothing, as others are not "
    "admitted (line 1)",
    "others: {admitted: false, quotas: {devices: 1}}": "others.quotas: means nothing, as others "
    "are not admitted (line 1)",
    VISION % "{users: [ada, {name: ada}]}": "virtual_clusters.vision.users[1]: names the user "
    "'ada' again, after virtual_clusters.vision.users[0] (line 1)",
    "virtual_clusters:\n  a: {users: [ada, 's-*']}\n  b:\n    groups: {g: {members: ['s-*']}}": (
        "virtual_clusters.b.groups.g.members[0]: names the pattern 's-*', who is in the virtual "
        "cluster a already (line 4)"
    ),
    VISION % "{groups: {a: {members: [ada]}, b: {members: [ada]}}}": "virtual_clusters.vision"
    ".groups.b.members[0]: names the user 'ada' again, after "
    "virtual_clusters.vision.groups.a.members[0] (line 1)",
    # Devices of the cluster, and guarantees of them.
    "cluster: {}": "cluster.devices_per_host: is missing (line 1)",
    "cluster: {hosts: 2}": "cluster.devices_per_host: is missing (line 1)",
    "cluster: {devices_per_host: 0}": "cluster.devices_per_host: must be above 0 (1 to 10000), "
    "not 0 (line 1)",
    "cluster: {hosts: 200, devices_per_host: 100}": "cluster: makes more than 10000 devices, "
    "which are allowed (line 1)",
    "cluster: {devices_per_host: 2, physical_cells: [{cell_type: a}]}": "cluster: has equal hosts "
    "and cells; one of the two is allowed (line 1)",
    "cluster: {cell_types: {n: {child_cell_type: g, child_cell_number: 2}}}": "cluster"
    ".physical_cells: is missing (line 1)",
    VISION % "{guaranteed_devices: 1}": "virtual_clusters.vision.guaranteed_devices: needs to "
    "know what there is: cluster.devices_per_host is missing (line 1)",
    VISION % "{guaranteed_cells: [{cell_type: a}]}": "virtual_clusters.vision.guaranteed_cells: "
    "needs cells: cluster.physical_cells is missing (line 1)",
    f"{HOSTS}{VISION % '{pinned_cells: [a]}'}": "virtual_clusters.vision.pinned_cells: needs "
    "cells: cluster.physical_cells is missing (line 2)",
    f"{HOSTS}virtual_clusters:\n  a: {{guaranteed_devices: 3}}\n  b: {{guaranteed_devices: 2}}": (
        "virtual_clusters.b: Virtual clusters are promised 5 devices, and there are 4 (line 4)"
    ),
    f"{CELLS}  physical_cells: [{{cell_type: rak}}]": "cluster.physical_cells[0].cell_type: must "
    "be one of cell_types (node, rack), not 'rak' (line 5)",
    f"{RACK}virtual_clusters:\n  a: {{guaranteed_cells: [{{cell_type: rack.nod}}]}}": (
        "virtual_clusters.a: a has cells of nod in rack: there are none (line 7)"
    ),
    f"{RACK}virtual_clusters:\n  a: {{}}\n  b: {{pinned_cells: [yours]}}\n  c: {{}}": (
        "virtual_clusters.b: b has the pinned cell 'yours', which is no cell (line 8)"
    ),
    f"{RACK}virtual_clusters:\n  a: {{pinned_cells: [mine]}}\n"
    "  b: {guaranteed_cells: [{cell_type: rack}]}": (
        "virtual_clusters.b: Virtual clusters are promised 1 cells of level 3 (rack) of chain "
        "rack, and 0 are left when pinned cells and what is promised of higher levels are set "
        "aside (line 8)"
    ),
    f"{RACK}virtual_clusters:\n"
    "  a: {guaranteed_cells: [{cell_type: rack.node, cell_number: 2}]}\n"
    "  b: {guaranteed_cells: [{cell_type: rack.node.gpu, cell_number: 3}]}\n": (
        "virtual_clusters.b: Virtual clusters are promised 3 cells of level 1 (gpu) of chain rack, "
        "and 2 are left when pinned cells and what is promised of higher levels are set aside "
        "(line 8)"
    ),
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_document_errors_are_one_line(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert str(caught.value) == REFUSED[text]


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(f'*{old}' for _ in range(10))}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "a bomb of aliases": (LAUGHS, "anchor"),
    "an alias alone": ("defaults: *a", "alias"),
    "an alias as a key": ("{*a : b}", "alias"),
    "a merge": ("defaults: {<<: {tier: basic}}", "no key here"),
    "a tag that makes objects": ("!!python/object/apply:os.system [id]", "tag"),
    "a tag of a value": ("defaults: {weight: !!float 1}", "tag"),
    "a tag of ours": ("%TAG ! tag:x,2000:\n---\n!a {}", "tag"),
    "an old version": ("%YAML 9.9\n---\n{}", "not YAML"),
    "a version that is no number": ("%YAML " + "1" * 5000 + ".1\n---\n{}", "not YAML"),
    "megabytes": ("a" * (3 << 20), "too large"),
    "megabytes of another alphabet": (b"\xff" * (3 << 20), "too large"),
    "many lists within lists": ("[" * (TEXT_BYTES_MAX - 1), "too deep"),
    "many keys within keys": ("{a: " * 5000, "too deep"),
    "blocks within blocks": ("- " * 400 + "a", "too deep"),
    "one level too many": ("[" * (DEPTH_MAX + 1), "too deep"),
    "many values": ("[" + "a," * (VALUES_MAX + 1) + "]", "too large"),
    "many lines": ("- a\n" * (VALUES_MAX + 1), "too large"),
    "many keys": ("\n".join(f"k{i}: 1" for i in range(VALUES_MAX)), "too large"),
    "a long text": ("defaults: " + "x" * (SCALAR_CHARACTERS_MAX + 1), "too long"),
    "a long key": ("? " + "x" * (SCALAR_CHARACTERS_MAX + 1) + "\n: 1", "too long"),
    "a long quoted text": ("a: '" + "x\n" * 50_000 + "'", "too long"),
    "a huge number": ("defaults: {weight: " + "9" * 1000 + "}", "a number from"),
    "a huge negative number": ("cluster: {devices_per_host: -" + "9" * 1000 + "}", "above 0"),
    "a huge exponent": ("cluster: {devices_per_host: 1e" + "9" * 900 + "}", "a whole number"),
    "infinity": ("cluster: {devices_per_host: .inf}", "a whole number"),
    "no number": ("cluster: {devices_per_host: .nan}", "a whole number"),
    "a cell that contains itself": (
        "cluster: {cell_types: {a: {child_cell_type: b, child_cell_number: 1}, b: "
        "{child_cell_type: a, child_cell_number: 1}}, physical_cells: [{cell_type: a}]}",
        "contains itself",
    ),
    "many cells": (
        "cluster: {cell_types: {a: {child_cell_type: b, child_cell_number: 10000}, b: "
        "{child_cell_type: c, child_cell_number: 10000}}, physical_cells: [{cell_type: a}]}",
        "more than 10000 devices",
    ),
    "many top cells": (
        "cluster: {cell_types: {a: {child_cell_type: b, child_cell_number: 9000}}, physical_cells: "
        f"[{'{cell_type: a},' * 1000}]}}",
        "cluster.physical_cells[1]: makes more than 10000 devices",
    ),
    "not UTF-8": (b"defaults:\n  tier: \xff", "not UTF-8 text (line 2)"),
    "UTF-16": ("defaults: {}".encode("utf-16"), "not UTF-8"),
    "half of a character": ("defaults: é".encode()[:-1], "not UTF-8"),
    "an escape that is no character": ('a: "\\UFFFFFFFF"', "out of range"),
    "half of a pair": ('a: "\\uD800"', "printable"),
    "a lone surrogate": ("a: \ud800", "not allowed in YAML"),
    "a zero": ("a: \0", "not allowed in YAML"),
    "a control sequence": ('a: "\\e[2J"', "printable"),
    "a key that hides": ('defaults: {"\\u200bx": 1}', "printable"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_is_refused(what: str) -> None:
    text, why = HOSTILE[what]
    with pytest.raises(PolicyError, match=r"^[^\n]{1,400}$") as caught:
        parse(text)
    assert why in str(caught.value)
    assert str(caught.value).isprintable()


def test_bytes_and_text_are_equivalent() -> None:
    for text in EXAMPLES.values():
        assert parse(text) == parse(text.encode()) == parse("\ufeff" + text)


def test_names_are_texts_whatever_yaml_takes_them_for() -> None:
    (vision,) = parse(VISION % "{users: [no, 007, 12:30, 1e5, 1.50]}").virtual_clusters
    assert [user.name for user in vision.users] == ["no", "007", "12:30", "1e5", "1.50"]


def test_values_are_typed() -> None:
    policy = parse(
        "tiers: {basic: {suspend_after: 2min, hibernate_after: never, max_hold: 3 h}}\n"
        "defaults: {tier: premium, weight: 2, packing: true, "
        "quotas: {devices: 2.0, device_memory: 24 GiB, gpu_hours_per_day: 1.5, disk: unlimited}}"
    )
    basic, defaults = policy.tiers.basic, policy.defaults
    assert (basic.suspend_after, basic.hibernate_after) == (120, math.inf)
    assert (basic.max_hold, basic.gpu_percent) == (10800, None)
    assert (defaults.tier, defaults.weight, defaults.packing) == (Tier.PREMIUM, 2.0, True)
    assert (defaults.quotas.devices, defaults.quotas.device_memory) == (2, 24 << 30)
    assert (defaults.quotas.gpu_hours_per_day, defaults.quotas.disk) == (1.5, math.inf)
    assert policy.lines["defaults.quotas.disk"] == 2


@settings(STEADY, max_examples=50)
@given(policies())
def test_written_policies_are_read_again(policy: Policy) -> None:
    assert parse(dump(policy)) == policy


def test_an_empty_policy_is_written_as_nothing() -> None:
    assert dump(Policy()) == "{}\n"
    assert parse("{}") == Policy()


SPLICES = (
    "*a", "&a ", "!!set ", "- ", ": ", "[", "]", "{", "}", "'", '"', "|\n", ">", "#", "---\n",
    "? ", "\t", "\n", "  ", "~", "-1", "1e400", ".nan", "99999999999999999999", "true", "never",
    "\\", "\x00", "é", "\u2028", "name", "tier: basic\n", "%YAML 1.1\n", "<<: ",
)  # fmt: skip


def mutant(text: str, chance: random.Random) -> str:
    """Change a text in one to four places."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        to = min(len(text), at + chance.choice((0, 0, 1, 2, 10, 60)))
        between = chance.choice((*SPLICES, "", text[at:to] * 2))
        text = text[:at] + between + text[to:]
    return text


def attempt(text: str) -> tuple[Policy | None, str]:
    """Parse a policy, or return its error; any other exception fails the test."""
    try:
        return parse(text), ""
    except PolicyError as error:
        return None, str(error)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_damaged_examples_are_refused_or_read(example: str, seed: int) -> None:
    chance = random.Random(f"{example} {seed}")
    outcomes = set()
    for _ in range(60):
        text = mutant(EXAMPLES[example], chance)
        policy, problem = attempt(text)
        outcomes.add("read" if policy else "refused")
        assert problem.isprintable()
        assert len(problem) < 600
        assert policy is None or parse(dump(policy)) == policy
    assert outcomes == {"refused", "read"}
