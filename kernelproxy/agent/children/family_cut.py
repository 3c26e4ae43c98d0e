"""All sessions of processes that a kernel has started, at one moment, for its checkpoint.

Note [Cut]: the moment is consistent although each process runs alone. First every process
detaches: it appends nothing to its log any more, and threads that want to use the device wait. Then
the devices execute each log to its end, and each state is saved there. So no device state changes
any more while the processes still run, and exchange what they have read before. CRIU stops all of
them at once: what is under way between them, in sockets and shared memory, is in the images.
Afterwards each process reattaches: to its session or, in a restored copy, to another one in the
saved state.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from kernelproxy.agent.children.child_saver import ChildSaver
from kernelproxy.agent.children.saved_child import ChildSide
from kernelproxy.agent.session.job import JobRank
from kernelproxy.common.errors import ControlError
from kernelproxy.criu.process_tree import is_within, numbers

ANOTHER = "Another process has begun to use the device meanwhile: try again."


class FamilyCut:
    """The sessions below one, detached and saved from `begin` until `close`.

    Parameters
    ----------
    find : callable
        Returns the sessions below it, parents before their own children.
    """

    def __init__(self, find: Callable[[], Sequence[ChildSaver]]) -> None:
        self._find = find
        self._children: list[ChildSaver] = []
        self._over = asyncio.Event()
        self._holding: list[asyncio.Task[None]] = []

    async def begin(self, kernel_pid: int, kernel_job: JobRank | None) -> None:
        """Detach all processes, and save their device states; the devices continue to be held.

        Parameters
        ----------
        kernel_pid : int
            Process that has started them.
        kernel_job : JobRank or None
            Its own place in a job.

        Raises
        ------
        ControlError
            If that is not possible for one of them.
        """
        self._children = list(self._find())
        if not self._children:
            return
        self._check_can_be_saved(kernel_pid, kernel_job)
        await _all(*(each.leave() for each in self._children))
        await _all(*(each.settle() for each in self._children))
        loop = asyncio.get_running_loop()
        saved = []
        for each in self._children:
            ready: asyncio.Future[None] = loop.create_future()
            self._holding.append(asyncio.create_task(each.hold(ready, self._over)))
            saved.append(ready)
        await _all(*saved)

    def _check_can_be_saved(self, kernel_pid: int, kernel_job: JobRank | None) -> None:
        """Raise ControlError for a process that would not be saved with the kernel's."""
        for each in self._children:
            if not is_within(each.pid, kernel_pid):
                raise ControlError(
                    f"{each.name}: It is no process of the notebook's any more, or has only begun "
                    "to use the device.",
                    "unavailable",
                )
        jobs = [job for job in (kernel_job, *(each.job for each in self._children)) if job]
        here = Counter(job.id for job in jobs)
        for job in jobs:
            if here[job.id] != job.size:
                raise ControlError(
                    f"Its job has {job.size} ranks, and {here[job.id]} of them are processes of "
                    "this notebook.",
                    "unavailable",
                )

    def check(self) -> None:
        """Raise ControlError if a process has begun to use the device, or one has ended."""
        found = {each.id for each in self._find()}
        for each in self._children:
            if each.id not in found:
                raise ControlError(f"{each.name}: It has ended meanwhile.", "busy")
            each.check()
        if len(found) > len(self._children):
            raise ControlError(ANOTHER, "busy")

    def sides(self, kernel_pid: int) -> list[ChildSide]:
        """Return the parts of the checkpoint; raises as `check`, and OSError without the kernel."""
        self.check()
        depth = len(numbers(kernel_pid))
        return [each.side(depth) for each in self._children]

    def wake(self) -> None:
        """Make all processes reattach. Idempotent."""
        for each in self._children:
            each.wake()

    async def close(self) -> None:
        """Let the sessions change again. Idempotent."""
        self.wake()
        self._over.set()
        holding, self._holding = self._holding, []
        await asyncio.gather(*holding, return_exceptions=True)


async def _all(*work: Awaitable[None]) -> None:
    """Wait for all, also if one fails; then raise the first failure."""
    for found in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
