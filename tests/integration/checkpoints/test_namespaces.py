"""Namespaces of notebooks, saved in one process and restored in another: correct, or reported."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Notebook

Group = tuple[str, ...]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "programs" / "namespaces.py"
# Groups that run in one process, in this order, as settings of the last ones persist.
GROUPS = (("language", "classes", "numeric", "process"), ("training", "stories", "libraries"))
NOTEBOOKS = [
    pytest.param(group, notebook, id=notebook.name)
    for group in GROUPS
    for topic in group
    for notebook in importlib.import_module(f"tests.namespaces.{topic}").NOTEBOOKS
]

pytestmark = pytest.mark.slow


@functools.cache
def exchanged() -> dict[Group, tuple[dict[str, Any], dict[str, Any]]]:
    """Run the notebooks of each group in one process, and restore them in another."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(GROUPS, pool.map(_exchange, GROUPS), strict=True))


def _exchange(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        return _step("save", group, place), _step("restore", group, place)


def _step(step: str, group: Group, place: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), step, ",".join(group), place],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{step} {group} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize(("group", "notebook"), NOTEBOOKS)
def test_namespace_is_right_or_named(group: Group, notebook: Notebook) -> None:
    saved, restored = (answers[notebook.name] for answers in exchanged()[group])
    assert "FAILED" not in saved["ran"], saved["ran"]
    assert set(saved["omitted"]) == set(notebook.omitted), saved["omitted"]
    assert set(saved["partly"]) == set(notebook.partly), saved["partly"]
    assert restored["problems"] == {}
    assert saved["output"]
    assert "FAILED" not in saved["output"], saved["output"]
    assert restored["output"] == saved["output"]
    assert restored["rolled_back"] == saved["output"]
