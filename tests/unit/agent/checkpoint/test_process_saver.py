"""Saving of a kernel's process: when a checkpoint includes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.checkpoint.process_saver import ProcessSaver
from kernelproxy.common.errors import ControlError


def saver(children: bool, manager: object | None = "there", shared: bool = False) -> ProcessSaver:
    core: Any = SimpleNamespace(shared=shared, inhibited=lambda *names: children)
    kernel: Any = SimpleNamespace(joined=True)
    managers: Any = SimpleNamespace(current=manager)
    nothing: Any = None
    return ProcessSaver(core, nothing, kernel, managers, nothing)


def test_a_checkpoint_includes_the_process_if_it_can() -> None:
    assert saver(children=False).wanted("")
    assert saver(children=False).wanted("process")
    assert not saver(children=False).wanted("namespace")
    assert not saver(children=False, manager=None).wanted("")
    with pytest.raises(ControlError, match="cannot be saved"):
        saver(children=False, manager=None).wanted("process")


def test_a_process_is_not_saved_while_its_children_have_sessions() -> None:
    assert not saver(children=True).wanted("")
    assert not saver(children=True).wanted("namespace")
    with pytest.raises(ControlError, match="processes that it started have GPU sessions") as raised:
        saver(children=True).wanted("process")
    assert raised.value.reason == "unavailable"
