"""Progress of long operations, for the callers that wait for them and for displays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import Progress
from kernelproxy.common.protocol.views import ProgressView
from kernelproxy.storage.threads import Cancel

T = TypeVar("T")
PROGRESS_SECONDS = 0.25

#: Called with the bytes done and the total, in any thread.
Note = Callable[[int, int], object]


def both(one: Note, other: Note) -> Note:
    """Return a callback that calls both."""

    def note(done: int, total: int) -> None:
        one(done, total)
        other(done, total)

    return note


class CheckpointProgress:
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
        """Register an operation, ``checkpoint`` or ``restore``, and its checkpoint.

        Yields the callback that takes its progress.
        """
        key = verb, name
        self._far[key] = 0, 0
        self._on_change()

        def note(done: int, total: int) -> None:
            if key in self._far:  # else the thread has outlived the operation
                self._far[key] = done, total

        try:
            yield note
        finally:
            self._far.pop(key, None)
            self._on_change()

    def far(self, verb: str, name: str) -> tuple[int, int]:
        """Return the bytes done and in total; (0, 0) if it has not begun or has ended."""
        return self._far.get((verb, name), (0, 0))

    def describe(self) -> ProgressView | None:
        """Return ``progress`` of ``openapi.yaml``: of several operations, the earliest."""
        for (verb, name), (done, total) in list(self._far.items()):
            return {"verb": verb, "checkpoint": name, "done": done, "total": total}
        return None


async def with_progress(
    channel: Channel,
    cancel: Cancel | None,
    work: Callable[[Note], Awaitable[T]],
    how_far: Callable[[], tuple[int, int]] | None = None,
) -> T:
    """Do something that takes a while, and report its progress to the caller.

    Parameters
    ----------
    channel : Channel
        Where `Progress` is sent; if it is closed, the reports end, but not the work.
    cancel : Cancel or None
        Set if this is cancelled; then the work is awaited. None: the work is cancelled.
    work : callable
        Called with a callback, to be called in any thread with the bytes done and the total.
    how_far : callable, optional
        Returns these numbers, if the work cannot report them.
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
