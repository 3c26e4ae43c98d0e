"""Live migration: copies a session's state to another device while its worker continues.

Note [Migration]: first a snapshot is taken, during execution if the session has a lease, and a
worker on the target loads it; this is repeated if much was written meanwhile. Then the gate is
closed, and the target receives what it lacks: by copying what was written since the snapshot, or,
between devices that compute exactly the same, by replaying the log since, if that is cheaper. At
last the old worker ends, and the new one takes the session over.

A rank of a job without a lease, which moves to a process of its job, takes along only what that
process lacks (`moved.h`). A recovery starts from the snapshot before, and the log since.

Until the old worker's end, any failure leaves the session where it was: the new worker has changed
nothing. From then on the new one is the session's worker, whose death is handled like any other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.seats import SeatSource, WorkerSource
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.common.errors import WorkerError
from kernelproxy.common.units import bytes_text
from kernelproxy.devices import Device

log = logging.getLogger(__name__)

#: Most copies during execution: a session that writes as fast as they copy must stop anyway.
ROUNDS_MAX = 3
#: A standstill, in seconds, so short that it is not worth another round.
SHORT_SECONDS = 0.05
#: Time limit for a process to list what it holds.
LIST_SECONDS = 30.0


@dataclass(frozen=True)
class Migration:
    """Cost of a migration.

    Parameters
    ----------
    source, target : str
        Ids of the devices.
    seconds : float
        From its beginning to its end.
    downtime : float
        Seconds during which nothing was executed.
    bytes : int
        Device bytes of the state that was moved.
    """

    source: str
    target: str
    seconds: float
    downtime: float
    bytes: int


async def migrate(
    state: DeviceState,
    source: WorkerSource,
    target: Device,
    check: Callable[[], object],
    on_change: Callable[[], object],
) -> Migration:
    """Migrate a session that has a worker.

    Parameters
    ----------
    state : DeviceState
        With a worker whose gate is open.
    source : WorkerSource
        Forks the worker on the target.
    target : Device
        Device on which the grant of the session is reserved already.
    check : callable
        Called when the worker stands still, before anything is final; if it raises, the migration
        is cancelled.
    on_change : callable
        For the new worker, see `Zygote.spawn`.

    Raises
    ------
    WorkerError
        If it failed; the session is where it was. Its worker may be broken, see `Worker.broken`.
    """
    begin, here = time.monotonic(), state.device
    moved = await _join_others(state, source, target, check, on_change)
    if moved is None:
        moved = await _copy(state, source, target, check, on_change)
    try:
        await state.replay(moved.executed)
    except WorkerError as error:  # it has migrated, and will be rebuilt there like any other
        log.warning("A worker died at the end of its migration: %s", error)
    end = time.monotonic()
    return Migration(here.id, target.id, end - begin, end - moved.stopped, moved.bytes)


@dataclass(frozen=True)
class _Moved:
    """A session whose worker was replaced.

    Parameters
    ----------
    stopped : float
        When it stopped, in seconds of the monotonic clock.
    bytes : int
    executed : int
        Position up to which the worker before has executed the log.
    """

    stopped: float
    bytes: int
    executed: int


async def _copy(
    state: DeviceState,
    source: WorkerSource,
    target: Device,
    check: Callable[[], object],
    on_change: Callable[[], object],
) -> _Moved:
    """Copy all of its state, while it executes if it has a lease; see `migrate`."""
    if not state.saved or state.snapshot is None:  # a prepared worker begins with a snapshot
        await state.save(stop=not state.leased)
    there = await state.open_worker(source, on_change, target, prepare=True)
    try:
        for _ in range(ROUNDS_MAX - 1):
            lacking = state.dirty_bytes
            if state.copy_seconds(lacking) <= SHORT_SECONDS:
                break
            await state.save(stop=not state.leased)
            await state.pass_on(there)
            if state.dirty_bytes > lacking // 2:
                break  # it writes as fast as we copy
        stopped = time.monotonic()
        async with state.gate_closed():
            check()
            if not state.saved and (
                not state.device.computes_like(target)
                or state.copy_seconds(state.dirty_bytes) < state.tail_seconds
            ):
                await state.save(stop=True)
                await state.pass_on(there)
            return await _replace(state, there, target, stopped)
    except BaseException:
        await _give_up(there, state)
        raise


async def _join_others(
    state: DeviceState,
    source: WorkerSource,
    target: Device,
    check: Callable[[], object],
    on_change: Callable[[], object],
) -> _Moved | None:
    """Move a rank to a process of its job, and copy only what that lacks; see `moved.h`.

    None: that is not possible now, and the session is where it was.
    """
    if not (isinstance(source, SeatSource) and state.may_depart(target)):
        return None
    there = await state.spawn_worker(source, on_change, target)
    try:
        known = await _contents_of(there)
        try:
            stopped = time.monotonic()
            async with state.gate_closed():
                check()
                departure = await state.depart(known)
                try:
                    await state.open_spawned(there, target, prepare=True, departure=departure)
                except WorkerError as error:
                    log.info("A rank takes all of its bytes along: %s", error)
                    return None
                finally:
                    departure.close()
                log.info(
                    "A rank brings %s to worker %d, where it finds %d storages",
                    bytes_text(departure.copied), there.pid, departure.omitted,
                )  # fmt: skip
                return await _replace(state, there, target, stopped)
        finally:
            os.close(known)
    except BaseException:
        await _give_up(there, state)
        raise


async def _contents_of(there: Worker) -> int:
    """Return a file of what a worker's process holds."""
    if there.joined:
        return await there.list_contents(LIST_SECONDS)
    return os.memfd_create("nothing", os.MFD_CLOEXEC)


async def _replace(state: DeviceState, there: Worker, target: Device, stopped: float) -> _Moved:
    """Replace the worker of a session whose gate is closed."""
    moved = _Moved(stopped, state.resident_bytes, state.memory.worker.consumed)
    await state.replace_worker(there, target)
    return moved


async def _give_up(worker: Worker, state: DeviceState) -> None:
    """End a prepared worker that is not needed."""
    if state.worker is worker:
        return
    try:
        await worker.stop()
    finally:
        worker.close()
