"""The words for reasons are one list; none of them is unused."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from kernelproxy.common import errors
from kernelproxy.common.errors import ProcessReason, Reason, StoreReason
from kernelproxy.common.ipc.framing import FrameDecoder, encode
from kernelproxy.common.protocol import Error

ROOT = Path(__file__).resolve().parents[3]


def words() -> set[str]:
    """Return all string constants of the product, except those of the list itself."""
    found = set()
    for top in ("kernelproxy", "jupyter_sing"):
        for path in (ROOT / top).rglob("*.py"):
            if path != Path(errors.__file__):
                tree = ast.parse(path.read_text("utf-8"))
                found |= {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
    return {each for each in found if isinstance(each, str)}


def test_each_reason_is_used() -> None:
    assert set(get_args(Reason)) <= words()


def test_reasons_of_parts_are_reasons() -> None:
    assert set(get_args(Reason)) > set(get_args(StoreReason)) | set(get_args(ProcessReason))


@pytest.mark.parametrize("reason", [*get_args(Reason), "of-a-newer-daemon"])
def test_reasons_travel_as_words(reason: Reason) -> None:
    decoder = FrameDecoder()
    decoder.feed(encode(Error("No.", reason)), [])
    assert decoder.next_message() == (Error("No.", reason), [])
