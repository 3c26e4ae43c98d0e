"""Ranks of a process group as threads of one process, each with an endpoint of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import distributed

from kernelproxy.kernel.collectives.group import Call, Group
from kernelproxy.kernel.collectives.transport.endpoint import Endpoint
from tests.doubles.session.client import WAIT_SECONDS

T = TypeVar("T")


class RankThreads:
    """The ranks of one group.

    Parameters
    ----------
    size : int
        Number of ranks.
    local : bool
        With sockets of the host; without, with TCP.
    """

    def __init__(self, size: int, *, local: bool = True) -> None:
        #: Where they find each other.
        self.store = distributed.HashStore()  # type: ignore[attr-defined]
        self.endpoints = [Endpoint(local=local) for _ in range(size)]
        self.groups = [
            Group("test", rank, size, self.store, own) for rank, own in enumerate(self.endpoints)
        ]
        self._pool = ThreadPoolExecutor(size)

    def all(self, program: Callable[[Group], T]) -> list[T]:
        """Run a program on all ranks; return its results, or raise the first error."""
        futures = [self._pool.submit(program, group) for group in self.groups]
        return [future.result(WAIT_SECONDS) for future in futures]

    def errors(self, program: Callable[[Group], object]) -> list[str]:
        """Run a program that fails on all ranks; return the errors."""
        futures = [self._pool.submit(program, group) for group in self.groups]
        found = [future.exception(WAIT_SECONDS) for future in futures]
        assert all(isinstance(error, Exception) for error in found), found
        return [str(error) for error in found]

    def end(self, rank: int) -> None:
        """End a rank, as others see the end of its process."""
        self.endpoints[rank].close()

    def close(self) -> None:
        """End all."""
        self._pool.shutdown()
        for each in self.endpoints:
            each.close()


def call(group: Group, text: str, function: Callable[[Call], T]) -> T:
    """Take part in a collective."""
    own = group.begin(text)
    with own.taking_part():
        return function(own)
