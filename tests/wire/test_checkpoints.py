"""Checkpoints that earlier versions saved can be restored."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kernelproxy.storage import manifest
from tests.e2e.kernels import kernel
from tests.wire.notebook import TELL
from tests.wire.record import CHECKPOINTS, STORED

pytestmark = [pytest.mark.e2e]


def put(checkpoint: Path, states: Path) -> None:
    """Put a recorded checkpoint into a store, as one of the user who runs the test."""
    states.mkdir(parents=True, mode=0o700)
    for name in STORED:
        shutil.copytree(checkpoint / name, states / name)
    for each in (states, *states.rglob("*")):
        each.chmod(0o700 if each.is_dir() else 0o600)
    (file,) = (states / "manifests").rglob("*.json")
    found = manifest.decode(file.read_bytes(), file.name)
    owner = f"{os.getuid()}-checkpoints"
    if found.label.owner != owner:
        ours = replace(found, label=replace(found.label, owner=owner))
        file.write_bytes(manifest.encode(ours))
        file.parent.rename(file.parent.with_name(owner))


@pytest.mark.parametrize("version", sorted(each.name for each in CHECKPOINTS.iterdir()))
def test_a_checkpoint_of_an_earlier_version_is_restored(
    version: str, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    checkpoint = CHECKPOINTS / version
    put(checkpoint, tmp_path / "data" / "states")
    with kernel() as notebook:
        restored = notebook.run("%sing restore recorded")
        assert restored.stdout.startswith("Restored 3"), restored  # some forty variables
        assert "not restored" not in restored.stdout, restored
        told = notebook.run(TELL)
        assert told.stdout == (checkpoint / "told.txt").read_text(), told
