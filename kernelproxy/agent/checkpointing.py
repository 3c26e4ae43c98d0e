"""How a session's notebook is put away: the kernel captures, the agent saves and stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kernelproxy.agent.channel import Channel
from kernelproxy.agent.checkpoints import Checkpoints, DeviceSide, Host
from kernelproxy.errors import ControlError, SingError
from kernelproxy.protocol import Carried, Checkpoint, CheckpointBegun, Progress, Wish
from kernelproxy.snapshot.manifest import Manifest
from kernelproxy.snapshot.together import Cancel

if TYPE_CHECKING:
    from kernelproxy.agent.session import Session

T = TypeVar("T")
_PROGRESS_SECONDS = 0.25


async def with_progress(
    channel: Channel,
    cancel: Cancel,
    work: Callable[[Callable[[int, int], object]], Awaitable[T]],
) -> T:
    """Do something that takes a while, and tell who waits how far it is.

    Parameters
    ----------
    channel : Channel
        Where `Progress` is sent; its end ends the telling, not the work.
    cancel : Cancel
        Set if this is cancelled; the work is waited for.
    work : callable
        Called with what it shall call, in any thread, with the bytes done and the total.
    """
    latest = [0, 0]

    def note(done: int, total: int) -> None:
        latest[:] = done, total

    async def run() -> T:
        return await work(note)

    task = asyncio.create_task(run())
    try:
        while not (await asyncio.wait({task}, timeout=_PROGRESS_SECONDS))[0]:
            with contextlib.suppress(OSError):
                await channel.send(Progress(*latest))
    except BaseException:
        cancel.set()
        await asyncio.wait({task})
        raise
    return task.result()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn what cannot be done into the refusal of a request."""
    try:
        yield
    except ControlError:
        raise
    except (SingError, OSError) as error:  # or the kernel was interrupted, and hung up
        raise ControlError(str(error), getattr(error, "reason", "failed")) from error


class Checkpointing:
    """Makes checkpoints of one session.

    Parameters
    ----------
    session : Session
    checkpoints : Checkpoints
    """

    def __init__(self, session: Session, checkpoints: Checkpoints) -> None:
        self._session, self._checkpoints = session, checkpoints
        self._last: Manifest | None = None
        self._asked: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, request: Checkpoint) -> dict[str, Any]:
        """Have the kernel make a checkpoint as soon as no cell runs; returns when it is stored.

        Raises
        ------
        ControlError
            If there is no kernel, or it could not.
        """
        name = self._checkpoints.name(request.name, self._session.name)
        return await self._ask(Wish("checkpoint", name, request.automatic))

    async def restore(self, name: str) -> dict[str, Any]:
        """Have the kernel restore a checkpoint as soon as no cell runs; raises as `ask`."""
        await self._checkpoints.check(self._session.owner, name)
        return await self._ask(Wish("restore", name))

    async def _ask(self, wish: Wish) -> dict[str, Any]:
        self._session.check_usable()
        key = wish.verb, wish.name
        asked = self._asked.get(key)
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._asked[key] = asked
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
            try:
                await self._session.kernel.send(wish)
            except ControlError as error:
                self._settle(key, error)
        return await asyncio.shield(asked)

    def carried(self, report: Carried) -> None:
        """Hear from the kernel what came of a wish."""
        key = report.verb, report.name
        if report.problem:
            self._settle(key, ControlError(report.problem, "failed"))
        elif report.verb == "restore":
            self._settle(key, report.outcome)

    def give_up(self, why: str) -> None:
        """Whoever waits for the kernel is told that nothing comes."""
        for key in list(self._asked):
            self._settle(key, ControlError(why, "ended"))

    async def make(
        self, request: Checkpoint, fds: Sequence[int], channel: Channel
    ) -> dict[str, Any]:
        """Store what the kernel has captured, with the device's state of the same moment.

        Parameters
        ----------
        request : Checkpoint
            Of the kernel.
        fds : sequence of int
            Host state, and contents of files; they stay the caller's.
        channel : Channel
            Where `CheckpointBegun` is sent.

        Raises
        ------
        ControlError
            If it cannot be made; the reason is that of the `StoreError`, if it was one.
        """
        name = self._checkpoints.name(request.name, self._session.name)
        try:
            sizes = [os.fstat(fd).st_size for fd in fds]
            host = Host.parse(request.host or {}, *sizes)
            async with self._session.exclusive():
                with _refusals():  # they are no fault of the session
                    made = await self._make(name, request.automatic, host, fds, channel)
        except ControlError as refusal:
            self._settle(("checkpoint", name), refusal)
            raise
        self._settle(("checkpoint", name), made)
        return made

    def _settle(self, key: tuple[str, str], outcome: dict[str, Any] | ControlError) -> None:
        asked = self._asked.get(key)
        if asked is None or asked.done():
            return
        if isinstance(outcome, ControlError):
            asked.set_exception(outcome)
            asked.exception()  # perhaps nobody waits any more
        else:
            asked.set_result(outcome)

    async def _make(
        self, name: str, automatic: bool, host: Host, fds: Sequence[int], channel: Channel
    ) -> dict[str, Any]:
        session = self._session
        session.check_usable()
        state, cancel = session.device_state, Cancel()
        telling: list[asyncio.Task[None]] = []

        def frozen() -> None:
            telling.append(asyncio.create_task(channel.send(CheckpointBegun())))

        if host.storages:
            if state.worker is not None and not state.saved:
                try:
                    await session.meanwhile(state.save(frozen=frozen))
                finally:
                    await asyncio.gather(*telling)
            if state.position != host.position:
                raise ControlError(
                    "Another thread of the notebook used the device meanwhile: try again.",
                    "busy",
                )
        if not telling:
            await channel.send(CheckpointBegun())
        label = self._checkpoints.label(
            session.owner,
            name,
            session.kernel.torch_version or "",
            state.device.kind.name.lower(),
            state.position,
            {
                "session": session.name,
                "kernel_id": session.kernel_id,
                "automatic": automatic,
                "forms": ["namespace"],
                "device": state.device.id,
                **host.about,
            },
        )
        device = DeviceSide(
            state.snapshot if host.storages else None,
            state.memory.arena_fd,
            state.disk.stored if state.disk.alone else self._last or state.disk.stored,
        )
        made, self._last = await session.meanwhile(
            with_progress(
                channel,
                cancel,
                lambda note: self._checkpoints.put(label, host, fds, device, cancel, note),
            )
        )
        return made
