"""An event loop in virtual time: when all tasks sleep, time advances to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Selector that waits for time only, and advances it without a delay."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("everybody waits, and for nothing")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock begins at 0, without processes, threads or files."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time; raise if any of its tasks failed."""
    loop, wrong = VirtualLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    try:
        result = loop.run_until_complete(main)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    for context in wrong:
        raise AssertionError(context["message"]) from context.get("exception")
    return result
