"""The processes that the ranks of jobs share, see Note [Seats] in `seat`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kernelproxy.agent.workers.seat import WorkerSeat
from kernelproxy.agent.workers.worker import Worker

log = logging.getLogger(__name__)


class WorkerSource(Protocol):
    """Forks workers: a zygote."""

    @property
    def dead(self) -> bool:
        """True if it can fork no worker any more."""

    async def spawn(self, on_change: Callable[[], object]) -> Worker:
        """Fork a worker; raises WorkerError."""


@dataclass(frozen=True)
class SeatKey:
    """Common properties of the sessions that share a process.

    Parameters
    ----------
    owner : int
        User id. The ids of jobs are those of one user.
    job : str
    device : str
    zygote : WorkerSource
        Their environment.
    """

    owner: int
    job: str
    device: str
    zygote: WorkerSource


@dataclass
class _Occupied:
    """A seat, and its workers, of which some may be closed."""

    seat: WorkerSeat
    workers: list[Worker] = field(default_factory=list)

    def host(self) -> Worker | None:
        """Return a worker that can receive `Host`, if there is one."""
        self.workers = [each for each in self.workers if each.pidfd is not None]
        return next((each for each in self.workers if each.can_host), None)

    @property
    def opening(self) -> bool:
        """True if one of its workers may become such a one."""
        return any(not (each.opened or each.broken) for each in self.workers)


class Seats:
    """All seats of a daemon. A seat is in it until its last session has ended."""

    def __init__(self) -> None:
        # Another agent has another one: then a rank that moves takes all of its bytes along.
        self._secret = secrets.token_bytes()
        self._seats: dict[SeatKey, _Occupied] = {}
        self._forking: dict[SeatKey, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        self._forget_empty()
        return len(self._seats)

    async def spawn(self, key: SeatKey, on_change: Callable[[], object]) -> Worker:
        """Return a worker in the process that others with the same key have, or in a new one.

        Parameters
        ----------
        key : SeatKey
        on_change : callable
            See `Zygote.spawn`.

        Raises
        ------
        WorkerError
            As `Zygote.spawn`.
        """
        self._forget_empty()
        while True:
            found = self._seats.get(key)
            if found is not None and (host := found.host()) is not None:
                if (worker := await host.host(on_change)) is not None:
                    found.workers.append(worker)
                    log.info("Worker %d has one more session", worker.pid)
                    return worker
            elif found is not None and found.opening:
                await found.seat.changed()
            elif key in self._forking:
                await asyncio.wait({self._forking[key]})
            else:
                return await self._fork(key, on_change)

    async def _fork(self, key: SeatKey, on_change: Callable[[], object]) -> Worker:
        forked = self._forking[key] = asyncio.get_running_loop().create_future()
        try:
            worker = await key.zygote.spawn(on_change)
            worker.begin_seat(seat := WorkerSeat(self._secret_of(key.owner, key.job)))
            self._seats[key] = _Occupied(seat, [worker])
            return worker
        finally:
            del self._forking[key]
            forked.set_result(None)

    def _secret_of(self, owner: int, job: str) -> str:
        """Return the secret of a job."""
        name = f"{owner} {job}".encode()
        return hashlib.blake2b(name, key=self._secret, digest_size=32).hexdigest()

    def _forget_empty(self) -> None:
        self._seats = {key: each for key, each in self._seats.items() if not each.seat.empty}


@dataclass(frozen=True)
class SeatSource:
    """A zygote, with the process in which its next worker may be.

    Parameters
    ----------
    key : SeatKey
    seats : Seats
    """

    key: SeatKey
    seats: Seats

    @property
    def dead(self) -> bool:
        """True if it can fork no worker any more."""
        return self.key.zygote.dead

    async def spawn(self, on_change: Callable[[], object]) -> Worker:
        """See `Seats.spawn`."""
        return await self.seats.spawn(self.key, on_change)
