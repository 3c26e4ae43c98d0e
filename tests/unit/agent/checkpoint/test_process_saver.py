"""Saving of a kernel's process: when a checkpoint includes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.checkpoint.process_saver import ProcessSaver
from kernelproxy.common.errors import ControlError


def saver(manager: object | None = "there", shared: bool = False) -> ProcessSaver:
    core: Any = SimpleNamespace(shared=shared)
    kernel: Any = SimpleNamespace(joined=True)
    managers: Any = SimpleNamespace(current=manager)
    nothing: Any = None
    return ProcessSaver(core, nothing, kernel, managers, nothing, nothing)


def test_a_checkpoint_includes_the_process_if_it_can() -> None:
    assert saver().wanted("")
    assert saver().wanted("process")
    assert not saver().wanted("namespace")
    assert not saver(manager=None).wanted("")
    with pytest.raises(ControlError, match="cannot be saved"):
        saver(manager=None).wanted("process")
