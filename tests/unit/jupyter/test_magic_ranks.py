"""``%sing ranks``: how many GPUs a notebook sees."""

from __future__ import annotations

import os

import pytest

from jupyter_sing.notebook import magics
from kernelproxy.kernel import activation


@pytest.fixture(autouse=True)
def _in_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magics, "_session_id", lambda: "s")
    monkeypatch.setenv("SING_RANKS", "")


def test_a_notebook_sees_one_gpu_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    magics.sing("ranks")
    assert capsys.readouterr().out.startswith("This notebook sees 1 GPU: ")


def test_a_number_of_ranks_is_inherited_by_children(capsys: pytest.CaptureFixture[str]) -> None:
    magics.sing("ranks 4")
    assert capsys.readouterr().out == (
        "This notebook sees 4 GPUs: programs that start a process for each GPU start 4.\n"
    )
    assert (os.environ["SING_RANKS"], activation.ranks()) == ("4", 4)
    magics.sing("ranks 1")
    assert activation.ranks() == 1


@pytest.mark.parametrize("wanted", ["0", "-1", "65", "four", "1.5"])
def test_an_invalid_number_of_ranks_changes_nothing(
    wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    magics.sing("ranks 2")
    capsys.readouterr()
    magics.sing(f"ranks {wanted}")
    assert capsys.readouterr().err == (
        f"jupyter_sing: %sing ranks {wanted} is no number of ranks: write one from 1 to 64.\n"
    )
    assert activation.ranks() == 2


@pytest.mark.parametrize("text", ["", "0", "-3", "many", "²"])
def test_a_variable_that_is_no_number_means_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SING_RANKS", text)
    assert activation.ranks() == 1


def test_a_notebook_without_a_session_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(magics, "_session_id", lambda: "")
    magics.sing("ranks 4")
    assert (capsys.readouterr().out, os.environ["SING_RANKS"]) == ("", "")
