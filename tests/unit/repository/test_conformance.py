"""Reports of `tests/conformance` from its programs' output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.refused import REFUSED
from tests.conformance.running import Report


def result(name: str, **found: Any) -> dict[str, Any]:
    counts = {"passed": 0, "refused": 0, "failed": 0, "refusals": {}, "failures": []}
    return {"name": name, **counts, **found}


def test_samples_are_counted() -> None:
    report = Report()
    report.add(result("add float32", passed=98, failed=1, failures=["sample 3: other values"]))
    report.add(result("mul bool", passed=1))
    assert (report.passed, report.refused, report.failed) == (99, 0, 1)
    assert report.passing == 0.99
    lines = list(report.lines())
    assert "add float32:" in lines
    assert lines[-1] == "samples: 99 passed, 0 refused, 1 failed (99.00 % passed)"


def test_a_refusal_without_a_listed_reason_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED, "mul", "a reason")
    report = Report()
    report.add(result("add float32", refused=1, refusals={"not here": 1}))
    report.add(result("mul float32", refused=1, refusals={"no sparse tensors": 1}))
    assert report.refusals == {"add": ["not here"]}
    assert any("not in tests/conformance/refused.py" in line for line in report.lines())
