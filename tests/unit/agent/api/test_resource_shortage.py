"""If descriptors or memory are lacking, sessions and kernels wait instead of ending."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.api import request_handlers
from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.lifecycle.family import Families


class AdoptedRecord:
    """Record of a session that is to be adopted."""

    session = "0123abcd"

    def __init__(self) -> None:
        self.ended: list[str] = []

    def __enter__(self) -> AdoptedRecord:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def end(self, reason: str) -> None:
        self.ended.append(reason)


def adopt(error: Exception) -> list[str]:
    def fail(_: object) -> None:
        raise error

    agent: Any = object.__new__(Agent)
    agent.recorder = SimpleNamespace(begin=lambda **_: None)
    agent.sessions, agent._adopt = {}, fail
    agent._fdstore = SimpleNamespace(drop=lambda _: None)
    agent._families = Families(agent.sessions)
    persisted: Any = AdoptedRecord()
    try:
        agent.adopt([persisted])
    except (OSError, MemoryError):
        persisted.ended.append("raised")
    ended: list[str] = persisted.ended
    return ended


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOMEM, ""), MemoryError()],
)
def test_a_session_for_which_something_is_wanting_is_left_to_the_next_agent(
    error: Exception,
) -> None:
    assert adopt(error) == ["raised"]


def test_a_session_that_cannot_be_rebuilt_ends() -> None:
    assert adopt(OSError(errno.EBADF, "")) == ["It did not outlive its daemon: [Errno 9] ."]
    assert adopt(KeyError("state")) == ["It did not outlive its daemon: 'state'."]


def test_a_kernel_joins_when_there_are_descriptors_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handlers, "pause", lambda *_: 0.0)
    errors = [OSError(errno.EMFILE, ""), OSError(errno.ENFILE, "")]

    async def serve() -> None:
        if errors:
            raise errors.pop()

    asyncio.run(request_handlers._when_possible(serve))
    assert errors == []


def test_a_kernel_that_has_gone_is_waited_for_no_longer() -> None:
    async def serve() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        asyncio.run(request_handlers._when_possible(serve))
