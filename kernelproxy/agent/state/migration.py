"""Live migration: a session's state goes to another device while its worker goes on.

Note [Migration]: first a snapshot is taken beside the execution, and a worker on the target loads
it; once more if much was written meanwhile. Then the gate closes, and what the target lacks gets
there by the cheaper way: copying what was written since the snapshot, or executing the log since.
At last the old worker ends and the new one has the session.

Until the old worker's end, whatever fails leaves the session where it was: the new worker has
touched nothing. From then on the new one is its worker, whose death is like any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.agent.workers.worker import Worker
from kernelproxy.agent.workers.zygotes import Zygote
from kernelproxy.common.errors import WorkerError
from kernelproxy.devices import Device

log = logging.getLogger(__name__)

#: Copies beside the execution, at most: a session that writes as fast as that copies stops anyway.
ROUNDS_MAX = 3
#: A standstill that is not worth another round, in seconds.
SHORT_SECONDS = 0.05


@dataclass(frozen=True)
class Migration:
    """What a migration has cost.

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
    zygote: Zygote,
    target: Device,
    check: Callable[[], object],
    on_change: Callable[[], object],
) -> Migration:
    """Move a session that has a worker.

    Parameters
    ----------
    state : DeviceState
        With a worker whose gate is open.
    zygote : Zygote
        Of the session's environment.
    target : Device
        Where the grant of the session is reserved already.
    check : callable
        Called when the worker stands still, before anything is final; what it raises ends the
        migration.
    on_change : callable
        For the new worker, see `Zygote.spawn`.

    Raises
    ------
    WorkerError
        If it failed; the session is where it was. Its worker may be broken, see `Worker.broken`.
    """
    begin, source = time.monotonic(), state.device
    if not state.saved:
        await state.save()
    there = await state.open_worker(zygote, on_change, target, prepare=True)
    try:
        for _ in range(ROUNDS_MAX - 1):
            lacking = state.dirty_bytes
            if state.copy_seconds(lacking) <= SHORT_SECONDS:
                break
            await state.save()
            await state.pass_on(there)
            if state.dirty_bytes > lacking // 2:
                break  # it writes as fast as we copy
        stopped = time.monotonic()
        async with state.standing():
            check()
            if not state.saved and state.copy_seconds(state.dirty_bytes) < state.tail_seconds:
                await state.save(stop=True)
                await state.pass_on(there)
            moved, executed = state.resident_bytes, state.memory.worker.consumed
            await state.replace_worker(there, target)
    except BaseException:
        await _give_up(there, state)
        raise
    try:
        await state.replay(executed)
    except WorkerError as error:  # it has moved, and is restored there like any other
        log.warning("A worker died at the end of its migration: %s", error)
    end = time.monotonic()
    return Migration(source.id, target.id, end - begin, end - stopped, moved)


async def _give_up(worker: Worker, state: DeviceState) -> None:
    """End a worker that was prepared in vain."""
    if state.worker is worker:
        return
    try:
        await worker.kill()
    finally:
        worker.close()
