"""The example files and the page about policies state what actually applies."""

from __future__ import annotations

import math
import re

import pytest

from jupyter_sing.scheduler.policy import parse, resolve
from jupyter_sing.scheduler.policy.document import schema
from jupyter_sing.scheduler.settings import Tier
from tests.scheduler.policy_strategies import DOCS, EXAMPLES

GIB = 1 << 30
PAGE = (DOCS / "policy.md").read_text("utf-8")

# Example, user: virtual cluster, group, tier, weight, packing, devices, GPU-hours, suspended after.
SAID = {
    ("laptop", "me"): ("default", None, "standard", 1, True, math.inf, math.inf, 1200),
    ("laptop", "root"): ("default", None, "standard", 1, True, math.inf, math.inf, 1200),
    ("laptop", ""): ("default", None, "standard", 1, True, math.inf, math.inf, 1200),
    ("lab", "ada"): ("lab", None, "standard", 1, True, 2, math.inf, 600),
    ("lab", "grace"): ("lab", None, "premium", 1, True, 3, math.inf, 600),
    ("lab", "robot"): ("lab", None, "basic", 1, True, 4, 24, 120),
    ("lab", "dr-who"): ("lab", "staff", "standard", 2, True, 2, math.inf, 600),
    ("lab", "s17"): ("lab", "students", "standard", 1, True, 2, math.inf, 600),
    ("lab", "sam"): ("default", None, "basic", 1, True, 1, 2, 120),
    ("course", "teacher"): ("teaching", None, "premium", 1, False, math.inf, math.inf, 600),
    ("course", "tina"): ("teaching", "assistants", "standard", 1, False, math.inf, math.inf, 600),
    ("course", "2026042"): ("course", "students", "basic", 1, True, 1, 4, 180),
    ("course", "2026001"): ("course", "students", "basic", 1, True, 1, 12, 180),
    ("departments", "ph-ada"): ("physics", None, "standard", 1, False, math.inf, math.inf, 600),
    ("departments", "ph-pipeline"): (
        "physics", "production", "premium", 1, False, math.inf, math.inf, 600,
    ),
    ("departments", "rosalind"): ("biology", None, "standard", 1, False, 4, math.inf, 600),
    ("departments", "guest"): ("physics", None, "basic", 1, False, 1, math.inf, 600),
}  # fmt: skip


@pytest.mark.parametrize(("example", "user"), SAID)
def test_examples_resolve_as_recorded(example: str, user: str) -> None:
    found = resolve(parse(EXAMPLES[example]), user)
    assert found.admitted
    assert (
        found.virtual_cluster,
        found.group,
        found.tier,
        found.weight,
        found.packing,
        found.quotas.devices,
        found.quotas.gpu_hours_per_day,
        found.terms.suspend_after,
    ) == SAID[example, user]


def test_every_example_is_resolved_for_three_users() -> None:
    assert {path.stem for path in (DOCS / "policies").iterdir()} == set(EXAMPLES)
    for example in EXAMPLES:
        assert sum(asked == example for asked, _ in SAID) >= 3


def test_a_course_refuses_other_users() -> None:
    found = resolve(parse(EXAMPLES["course"]), "eve")
    assert not found.admitted
    assert found.decided[0].path == "others.admitted"


def test_the_laptop_hibernates_and_the_students_have_little_memory() -> None:
    assert resolve(parse(EXAMPLES["laptop"]), "me").terms.hibernate_after == 86400
    student = resolve(parse(EXAMPLES["course"]), "2026042")
    assert (student.quotas.device_memory, student.terms.max_hold) == (8 * GIB, 300)
    assert student.cluster_quotas.devices == 6


def test_examples_are_short() -> None:
    assert max(text.count("\n") for text in EXAMPLES.values()) <= 50


BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_examples_of_the_page_are_policies(block: str) -> None:
    parse(block)


def test_the_page_shows_every_key() -> None:
    described = schema()
    records = [described, *described["definitions"].values()]
    keys = {key for record in records for key in record["properties"]}
    assert keys == {key for key in keys if re.search(rf"\b{key}:", "".join(BLOCKS))}
    assert keys == {key for key in keys if f"`{key}`" in PAGE}


def test_the_page_documents_the_defaults() -> None:
    built_in = resolve(parse("{}"), "anybody")
    assert (built_in.tier, built_in.weight, built_in.packing) == (Tier.STANDARD, 1, False)
    assert (built_in.terms.suspend_after, built_in.terms.hibernate_after) == (600, math.inf)
    for tier, percent in (("premium", 95), ("standard", 70), ("basic", 0)):
        found = resolve(parse(f"defaults: {{tier: {tier}}}"), "anybody")
        assert found.terms.gpu_percent == percent
        assert re.search(rf"`{tier}`[^|\n]*\| {percent} %", PAGE)
