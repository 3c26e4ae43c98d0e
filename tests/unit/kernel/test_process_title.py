"""The output of `ps` for a process that has a title."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernelproxy.worker import process_title

ROOT = Path(__file__).resolve().parents[3]
SHOW = (
    "import os, sys\n"
    "from kernelproxy.worker import process_title as title; title.show(os.environ['TITLE'])\n"
    "child = os.fork()\n"
    "if child == 0: title.show('sing: forked'); os._exit(0)\n"
    "os.waitpid(child, 0)\n"
    "sys.stdout.buffer.write(open('/proc/self/cmdline', 'rb').read())"
)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("sing: ada digits.ipynb cuda:0", "sing: ada digits.ipynb cuda:0"),
        ("sing: ada 実験　1.ipynb cpu:0", "sing: ada 実験　1.ipynb cpu:0"),
        ("sing: a\x1b[2J\n.ipynb", "sing: a\\x1b[2J\\n.ipynb"),
        ("ö" * 4000, "ö"),
        ("", ""),
    ],
)
def test_a_title_takes_the_place_of_the_command_line_and_no_more(told: str, shown: str) -> None:
    secret = {"PATH": "/usr/bin:/bin", "TITLE": told, "SECRET": "of its variables"}
    command = [sys.executable, "-c", SHOW, process_title.ROOM]
    done = subprocess.run(command, cwd=ROOT, env=secret, stdout=subprocess.PIPE, check=True)
    text = done.stdout.rstrip(b"\0").decode()
    if len(told) > 1000:
        assert set(text) == {"ö"}
        assert len(text) >= len(process_title.ROOM) // 2
    else:
        assert text == shown
    assert b"SECRET" not in done.stdout
