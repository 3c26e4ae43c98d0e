"""The tests that docs/testing.md names exist, and it names all that are exhaustive."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import LONGEST, ROOT

TESTS = ROOT / "tests"


def test_every_file_with_exhaustive_tests_is_on_the_page() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    named = set(re.findall(r"^\| `([\w/]+\.py)::", page, re.MULTILINE))
    marked = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if "pytest.mark.exhaustive" in path.read_text() and path != Path(__file__)
    }
    assert named == marked


def test_the_longest_files_exist() -> None:
    there = {path.name for path in TESTS.rglob("test_*.py")}
    assert set(LONGEST) <= there
