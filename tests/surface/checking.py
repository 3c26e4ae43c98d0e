"""Registration of the checks of `tests.surface`, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def refused(function: Callable[[], object], kind: type[Exception] = RuntimeError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"was not refused with {kind.__name__}")
