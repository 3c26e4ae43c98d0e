"""How far what takes a while is, for those who wait for it and for those who look."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import Progress
from kernelproxy.storage.threads import Cancel

T = TypeVar("T")
PROGRESS_SECONDS = 0.25

#: Called with the bytes done and the total, in any thread.
Note = Callable[[int, int], object]


def both(one: Note, other: Note) -> Note:
    """Tell two."""

    def note(done: int, total: int) -> None:
        one(done, total)
        other(done, total)

    return note


class Underway:
    """The checkpoints that are being stored or read for one session.

    Parameters
    ----------
    on_change : callable, optional
        Called when one begins and when it ends.
    """

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
        self._far: dict[tuple[str, str], tuple[int, int]] = {}

    @contextlib.contextmanager
    def doing(self, verb: str, name: str) -> Iterator[Note]:
        """Say that something is done, ``checkpoint`` or ``restore``, and to which; how far it is
        is to be told to what this returns.
        """
        key = verb, name
        self._far[key] = 0, 0
        self._on_change()

        def note(done: int, total: int) -> None:
            if key in self._far:  # else its thread has outlived it
                self._far[key] = done, total

        try:
            yield note
        finally:
            self._far.pop(key, None)
            self._on_change()

    def far(self, verb: str, name: str) -> tuple[int, int]:
        """Bytes done and in total; nothing of nothing, if it has not begun or has ended."""
        return self._far.get((verb, name), (0, 0))

    def describe(self) -> dict[str, Any] | None:
        """See ``progress`` in ``openapi.yaml``: of several, the one that began first."""
        for (verb, name), (done, total) in list(self._far.items()):
            return {"verb": verb, "checkpoint": name, "done": done, "total": total}
        return None


async def with_progress(
    channel: Channel,
    cancel: Cancel | None,
    work: Callable[[Note], Awaitable[T]],
    how_far: Callable[[], tuple[int, int]] | None = None,
) -> T:
    """Do something that takes a while, and tell who waits how far it is.

    Parameters
    ----------
    channel : Channel
        Where `Progress` is sent; its end ends the telling, not the work.
    cancel : Cancel or None
        Set if this is cancelled; the work is waited for. None: the work is cancelled.
    work : callable
        Called with what it shall call, in any thread, with the bytes done and the total.
    how_far : callable, optional
        Asked for these numbers, if the work cannot tell.
    """
    latest = [0, 0]

    def note(done: int, total: int) -> None:
        latest[:] = done, total

    async def run() -> T:
        return await work(note)

    task = asyncio.create_task(run())
    try:
        while not (await asyncio.wait({task}, timeout=PROGRESS_SECONDS))[0]:
            done, total = how_far() if how_far is not None else latest
            with contextlib.suppress(OSError):
                await channel.send(Progress(done, total))
    except BaseException:
        if cancel is not None:
            cancel.set()
        else:
            task.cancel()
        await asyncio.wait({task})
        raise
    return task.result()
