"""Messages about a checkpoint whose daemon died."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_sing.notebook.checkpoint_outcome import NOT_SAVED, CheckpointOutcome
from kernelproxy.common.errors import ControlError

BROKE = ControlError("The connection to the jupyter_sing daemon broke.", "no-daemon")
GONE = ControlError("No jupyter_sing daemon is running.", "no-daemon")
ONE, TWO = {"name": "one"}, {"name": "two"}


def outcome(monkeypatch: pytest.MonkeyPatch, *last: Any) -> CheckpointOutcome:
    answers = iter(last)

    def answer(_: CheckpointOutcome) -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(CheckpointOutcome, "_last", answer)
    return CheckpointOutcome("0123abcd")


@pytest.mark.parametrize("before", [None, ONE])
def test_outcome_is_the_checkpoint_that_was_saved(
    monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    assert outcome(monkeypatch, before, TWO).after(BROKE) == TWO


@pytest.mark.parametrize("before", [None, ONE])
def test_outcome_is_an_error_if_nothing_was_saved(
    monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    with pytest.raises(ControlError, match=NOT_SAVED):
        outcome(monkeypatch, before, before).after(BROKE)


def test_outcome_is_the_original_error_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ControlError("The disk is full.", "full")
    for error, last in ((refused, TWO), (BROKE, GONE)):
        with pytest.raises(ControlError) as caught:
            outcome(monkeypatch, ONE, last).after(error)
        assert caught.value is error
