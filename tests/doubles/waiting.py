"""Polling for changes in another process that sends no notification."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from tests.doubles.session.client import WAIT_SECONDS

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | Literal[False] | None], seconds: float = WAIT_SECONDS
) -> T:
    """Wait until a condition is true; return its value."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        pause.wait(0.01)
    return value
