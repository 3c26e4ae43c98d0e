"""Requests to a session's kernel: to make a checkpoint, or to restore one, between two cells."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.checkpoint.history import CheckpointHistory
from kernelproxy.agent.checkpoint.progress import CheckpointProgress, with_progress
from kernelproxy.agent.process.hibernation import Hibernation
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import FORMS, Carried, Checkpoint, KernelRequest, Restore
from kernelproxy.common.protocol.views import CheckpointView, RestoreView
from kernelproxy.storage.manifest import check_name


class CheckpointRequests:
    """The requests to one session's kernel.

    Parameters
    ----------
    core : SessionCore
    kernel : KernelConnection
    hibernation : Hibernation
    checkpoints : CheckpointCatalog
    history : CheckpointHistory
    """

    def __init__(
        self,
        core: SessionCore,
        kernel: KernelConnection,
        hibernation: Hibernation,
        checkpoints: CheckpointCatalog,
        history: CheckpointHistory,
    ) -> None:
        self._core, self._kernel, self._hibernation = core, kernel, hibernation
        self._checkpoints, self._history = checkpoints, history
        self._pending: dict[tuple[str, str], asyncio.Future[Mapping[str, Any]]] = {}
        #: Checkpoints that are being stored, or read, for the session.
        self.underway = CheckpointProgress(core.changed)
        self._waiters: Counter[tuple[str, str]] = Counter()  # number of waiters of each request
        self._withdrawing: asyncio.Task[None] | None = None
        core.inhibitors[Inhibitor.CHECKPOINT_REQUEST] = lambda: self.pending

    @property
    def pending(self) -> bool:
        """True if the kernel is to do something between two cells.

        It may need the device for that: a session that a user suspended must resume for it
        (Note [Holding]).
        """
        return bool(self._pending)

    async def ask(self, request: Checkpoint, channel: Channel | None = None) -> CheckpointView:
        """Ask the kernel to make a checkpoint as soon as no cell runs; return when it is stored.

        Parameters
        ----------
        request : Checkpoint
            From a caller other than the kernel.
        channel : Channel, optional
            Where `Progress` is sent.

        Raises
        ------
        ControlError
            If there is no kernel, or it failed.
        StoreError
            ``name``.
        """
        name = self._checkpoints.name(request.name, self._core.name)
        check_name(name, "name")  # before the notebook is captured in vain
        order = KernelRequest("checkpoint", name, request.automatic, request.form)
        if channel is None:
            return cast("CheckpointView", await self._ask(order))
        return cast("CheckpointView", await self._ask_showing(order, channel))

    async def restore(self, request: Restore, channel: Channel) -> RestoreView:
        """Ask the kernel to restore a checkpoint as soon as no cell runs; as `ask`."""
        await self._checkpoints.check(self._core.owner, request.name)
        outcome = await self._ask_showing(
            KernelRequest("restore", request.name, form=request.form), channel
        )
        self._history.note_use()
        return cast("RestoreView", outcome)

    async def _ask_showing(self, request: KernelRequest, channel: Channel) -> Mapping[str, Any]:
        """Do as `_ask`, and report progress, which the kernel's own request makes known here."""
        far = self.underway.far
        return await with_progress(
            channel,
            None,
            lambda _: self._ask(request),
            lambda: far(request.verb, request.name),
        )

    async def _ask(self, request: KernelRequest) -> Mapping[str, Any]:
        if request.form not in ("", *FORMS):
            raise ControlError(
                f"A form is {' or '.join(FORMS)}, not {request.form!r}.", "bad-request"
            )
        self._core.check_usable()
        await self._hibernation.wake()
        key = request.verb, request.name
        future = self._pending.get(key)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._pending[key] = future
            future.add_done_callback(lambda _: self._pending.pop(key, None))
            try:
                await self._kernel.send(request)
            except ControlError as error:
                self.settle(key, error)
        self._waiters[key] += 1
        try:
            return await asyncio.shield(future)
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]
                if not future.done():  # all callers have gone
                    future.cancel()
                    self._withdrawing = asyncio.create_task(self._withdraw(request))

    async def _withdraw(self, request: KernelRequest) -> None:
        """Withdraw a request from the kernel because no caller waits for it any more."""
        with contextlib.suppress(ControlError):
            await self._kernel.send(replace(request, withdrawn=True))

    def carried(self, report: Carried) -> None:
        """Receive the outcome of a request from the kernel."""
        key = report.verb, report.name
        if report.problem:
            self.settle(key, ControlError(report.problem, "failed"))
        elif report.verb == "restore":
            self.settle(key, report.outcome)

    async def settled(self, verb: str, name: str, seconds: float) -> None:
        """Wait until a request to the kernel has its outcome, for at most so many seconds."""
        if (future := self._pending.get((verb, name))) is not None:
            await asyncio.wait({future}, timeout=seconds)

    def give_up(self, why: str) -> None:
        """Fail all pending requests to the kernel."""
        for key in list(self._pending):
            self.settle(key, ControlError(why, "ended"))

    def settle(self, key: tuple[str, str], outcome: Mapping[str, Any] | ControlError) -> None:
        future = self._pending.get(key)
        if future is None or future.done():
            return
        if isinstance(outcome, ControlError):
            future.set_exception(outcome)
            future.exception()  # mark it as retrieved: perhaps no caller waits any more
        else:
            future.set_result(outcome)
