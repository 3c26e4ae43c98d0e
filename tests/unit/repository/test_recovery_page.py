"""The tests that docs/recovery.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_row_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "recovery.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`((?:tests|native)/[^`]+)`", row)
        assert named, row
        for each in named:
            path, name = re.split(r"::|: ", each)
            text = (ROOT / path).read_text()
            assert f"def {name}(" in text or f"TEST({name})" in text, each
