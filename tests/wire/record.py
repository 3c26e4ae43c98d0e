"""Record the current interfaces: ``python -m tests.wire.record``.

Installed versions and saved checkpoints do not know a changed interface: mention the change in the
commit, and keep old names readable.

``python -m tests.wire.record VERSION`` saves a checkpoint instead, beside those of older versions,
which stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.kernels import kernel
from tests.wire.contract import CONTRACT
from tests.wire.notebook import CREATE, TELL

RECORDED = Path(__file__).parent / "recorded"
CHECKPOINTS = RECORDED / "checkpoints"
#: Where a store keeps the files of a checkpoint.
STORED = ("chunks", "manifests")


def as_text(interface: Any) -> str:
    """Return the content of the file of an interface."""
    return json.dumps(interface, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def save_checkpoint(version: str) -> None:
    """Save the notebook, and its output, with a daemon of its own."""
    into = CHECKPOINTS / version
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        os.environ.update(
            IPYTHONDIR=str(base / "ipython"),
            JUPYTER_DEFAULT_PROVISIONER_NAME="sing",
            JUPYTER_SING_DATA_DIR=str(base / "data"),
            JUPYTER_SING_DEVICES="cpu:1GiB@1",
            JUPYTER_SING_RUNTIME_DIR=str(base / "runtime"),
        )
        os.chdir("/")  # a directory that exists everywhere: the checkpoint names it
        with kernel() as notebook:
            for cell in (CREATE, "%sing checkpoint recorded --form namespace"):
                ran = notebook.run(cell)
                assert (ran.error, ran.stderr) == ("", ""), ran
            told = notebook.run(TELL)
            assert not told.error, told
        for name in STORED:
            shutil.copytree(base / "data" / "states" / name, into / name)
    (into / "told.txt").write_text(told.stdout)


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(prog="python -m tests.wire.record", description=__doc__)
    parser.add_argument("version", nargs="?", help="save a checkpoint as this version makes it")
    version = parser.parse_args().version
    if version is not None:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", version):
            parser.error(f"{version!r} is not a version: write one such as 0.2")
        return save_checkpoint(version)
    for name, described in CONTRACT.items():
        (RECORDED / f"{name}.json").write_text(as_text(described()))
    return None


if __name__ == "__main__":
    main()
