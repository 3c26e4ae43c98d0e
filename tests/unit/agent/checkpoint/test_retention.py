"""The checkpoints of a notebook: which one restores it, and which may be removed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kernelproxy.agent.checkpoint.retention import (
    CheckpointOrigin,
    KernelRun,
    last,
    of_notebook,
    surplus,
)

HERE, THERE = "/home/ada/a/digits.ipynb", "/home/ada/b/digits.ipynb"


def record(
    name: str, run: str = "r2", *, by_hand: bool = False, **changes: object
) -> CheckpointOrigin:
    found = CheckpointOrigin(name, float(name.strip("c")), not by_hand, run, "k", HERE)
    return replace(found, **changes)  # type: ignore[arg-type]


def names(found: list[CheckpointOrigin]) -> list[str]:
    return [each.name for each in found]


def test_a_notebook_is_known_by_its_kernel_and_by_its_path() -> None:
    found = [
        record("c5"),
        record("c1", "r1"),
        record("c2", "r0", kernel_id="other"),  # another kernel of this notebook
        record("c3", "r9", kernel_id="other", notebook=THERE),
        record("c4", "r8", kernel_id="other", notebook=""),
        record("c6", "r7", kernel_id="other"),
        record("c7", "r1", notebook="/home/ada/renamed.ipynb"),
    ]
    run = KernelRun("r2", "k", HERE)
    assert names(of_notebook(found, run, {"r2", "r7"})) == ["c1", "c2", "c5", "c7"]
    nameless = KernelRun("r2", "", "")
    blank = [record("c1", kernel_id="", notebook=""), record("c2", "r1", kernel_id="", notebook="")]
    assert names(of_notebook(blank, nameless, {"r2"})) == ["c1"]


@pytest.mark.parametrize("seed", range(200))
def test_deletable_checkpoints_over_any_history(seed: int) -> None:
    """Manual ones stay, the newest stay, those of the last kernel stay; their number is bounded."""
    choice = random.Random(seed)
    keep, run, there, made_by_hand = choice.choice((1, 2, 3, 5)), 0, [], set()
    for number in range(60):
        event = choice.choice(("automatic", "automatic", "automatic", "by hand", "new run"))
        if event == "new run":
            run += 1
            continue
        there.append(record(f"c{number}", f"r{run}", by_hand=event == "by hand"))
        if event == "by hand":
            made_by_hand.add(there[-1].name)
            continue
        before = there
        gone = surplus(before, f"r{run}", keep)
        there = [each for each in before if each.name not in gone]
        own = [each for each in before if each.automatic and each.run == f"r{run}"]
        earlier = [each for each in before if each.automatic and each.run != f"r{run}"]
        assert made_by_hand <= set(names(there))
        assert own[-keep:] == [each for each in there if each in own]
        assert earlier[-1:] == [each for each in there if each in earlier][-1:]
        assert len([each for each in there if each.automatic]) <= 2 * keep
        assert surplus(there, f"r{run}", keep) == []


def test_of_earlier_runs_the_newest_of_each_stays() -> None:
    found = [record(f"c{n}", run) for n, run in enumerate(("a", "a", "b", "b", "c", "now"))]
    assert surplus(found, "now", 2) == ["c0", "c1", "c2"]
    assert surplus(found, "now", 3) == ["c0", "c2"]


def test_the_checkpoint_that_restores_a_notebook() -> None:
    old, new = record("c1", "r1"), record("c2", "r2")
    assert last([], "r2", set(), fresh=True) is None
    for mine, died, fresh, name, earlier, known in (
        ([old, new], {"r1"}, True, "c1", True, True),
        ([old, new], {"r1"}, False, "c2", False, False),
        ([old, new], set(), True, "c2", False, False),
        ([old, new], {"r0"}, True, "c2", False, False),
        ([old], set(), True, "c1", True, False),
        ([old], {"r1"}, False, "c1", True, True),
        ([new], {"r1"}, True, "c2", False, False),
    ):
        found = last(mine, "r2", died, fresh=fresh)
        assert found is not None
        assert (found.record.name, found.earlier, found.died) == (name, earlier, known)
