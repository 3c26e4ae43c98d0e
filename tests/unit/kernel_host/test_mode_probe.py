"""The search for CRIU, errors if there is none, and the stored result of a probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import mode_probe
from kernelproxy.criu.sandbox import Form


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program that is named, but fails."""
    file = tmp_path / "criu"
    file.write_text("#!/bin/sh\nexit 1\n")
    file.chmod(0o755)
    monkeypatch.setenv(mode_probe.VARIABLE, str(file))
    return file


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("", "JUPYTER_SING_CRIU is empty"),
        ("/nowhere/criu", "names /nowhere/criu, which is no program"),
        (None, "install CRIU 4.2, or name it in JUPYTER_SING_CRIU"),
    ],
)
def test_a_missing_mode_has_a_reason(
    named: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if named is None:
        monkeypatch.delenv(mode_probe.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(mode_probe.VARIABLE, named)
    with pytest.raises(ProcessError, match=why) as caught:
        mode_probe.find(tmp_path)
    assert caught.value.reason == "unavailable"
    assert not caught.value.recoverable


def test_the_one_on_the_path_is_found(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.delenv(mode_probe.VARIABLE)
    assert mode_probe.find_criu() == str(program)


def test_a_program_that_does_not_start_is_named(program: Path, tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=f"{program} does not start"):
        mode_probe.find(tmp_path)


@pytest.mark.parametrize(
    "kept", ["{", "[]", "{}", '{"key": "KEY"}', '{"key": "KEY", "kind": "none", "until": "soon"}']
)
def test_a_result_not_written_by_us_is_probed_again(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    found = Form("user", str(program))
    monkeypatch.setattr(mode_probe, "_key", lambda _: "KEY")
    monkeypatch.setattr(mode_probe, "_try_all", lambda _: found)
    (tmp_path / mode_probe.CACHE).write_text(kept)
    assert mode_probe.find(tmp_path) == found
    monkeypatch.setattr(mode_probe, "_try_all", lambda _: pytest.fail("tried again"))
    assert mode_probe.find(tmp_path) == found
