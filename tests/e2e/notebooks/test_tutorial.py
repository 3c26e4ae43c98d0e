"""The tutorial does what its text says."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TUTORIAL = Path(__file__).resolve().parents[3] / "docs" / "tutorial.ipynb"


def test_tutorial_trains_is_suspended_and_continues(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    notebook = nbformat.read(TUTORIAL, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed with outputs"
    check = "import sys; print([final_accuracy, x_train.is_cuda], file=sys.stderr)"
    notebook.cells.append(nbformat.v4.new_code_cell(check))

    nbclient.NotebookClient(notebook, timeout=240).execute()

    printed = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    states = [text.split()[0].rstrip(":.") for text in printed if " on Simulated GPU" in text]
    assert states == ["Idle", "Suspended", "Idle"]
    assert "the same to the last bit: True" in "".join(printed)
    final_accuracy, on_device = printed[-1].strip("[]\n ").split(", ")
    assert on_device == "True"
    assert float(final_accuracy) > 0.95
