"""tools/prose.py finds identifiers and names of tests that do not use the field's terms."""

from __future__ import annotations

import pytest

from tools.prose import DIALECT, PRODUCT_DIALECT, name_findings


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("on_wish = None\n", 1),
        ("class Heard: ...\n", 1),
        ("self._told = {}\n", 1),
        ("switchboard = nobody\n", 2),
        ("def test_it_works(): ...\n", 1),
        ("CheckpointBegun()\n", 0),
        ("on_request = received = None\n", 0),
        ("text = 'a wish'  # told\n", 0),
    ],
)
def test_identifiers_of_the_dialect_are_found(source: str, count: int) -> None:
    assert len([*name_findings(source, DIALECT | PRODUCT_DIALECT)]) == count


def test_words_of_the_product_alone_are_free_in_tests() -> None:
    assert [*name_findings("wishes = []\n", DIALECT)] == []
