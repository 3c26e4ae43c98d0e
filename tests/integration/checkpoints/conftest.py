"""Fixtures of tests that need kernels whose processes are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doubles.kernel.toy_process_manager import ToyProcessManager
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]
StartManager = Callable[..., ToyProcessManager]


@pytest.fixture
def start_manager(toy_host: StartHost) -> Iterator[StartManager]:
    """Return a function that opens a session of a host, and owns its kernel."""
    managers: list[ToyProcessManager] = []

    def start(host: ToyHost, *, listens: bool = False, **fields: Any) -> ToyProcessManager:
        managers.append(ToyProcessManager(host.open(**fields), listens=listens))
        return managers[-1]

    yield start
    for manager in managers:
        manager.close()
