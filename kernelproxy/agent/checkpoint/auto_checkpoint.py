"""Automatic checkpoints: when one is made, and which of the older ones may be deleted.

A kernel makes a checkpoint when the agent requests one, as soon as no cell runs. This module
decides when to request one. What counts is what was run: a notebook that has run nothing since its
last checkpoint gets no other one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.checkpoint.checkpoint_requests import CheckpointRequests
from kernelproxy.agent.checkpoint.history import CheckpointHistory
from kernelproxy.agent.checkpoint.retention import surplus
from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.session.kernel_connection import KernelConnection
from kernelproxy.agent.session.states import State
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError, SingError, StoreError
from kernelproxy.common.protocol import Checkpoint, OpenSession
from kernelproxy.common.protocol.views import AutomaticView

log = logging.getLogger(__name__)

#: Time limit for a checkpoint before the daemon's end, once it has begun.
STORE_SECONDS = 600.0


@dataclass(frozen=True)
class AutoCheckpointRule:
    """Rule for when checkpoints are made automatically.

    Parameters
    ----------
    every : float
        Seconds between two; 0 or less: not by time.
    cells : int
        Cells between two; 0 or less: not by cells.
    keep : int
        Number of checkpoints to keep, see `surplus`.
    """

    every: float = 0.0
    cells: int = 0
    keep: int = 3

    @classmethod
    def of(cls, request: OpenSession) -> AutoCheckpointRule:
        """Return the rule that a session was opened with."""
        keep = max(1, request.checkpoint_keep)
        return cls(request.checkpoint_every, request.checkpoint_cells, keep)

    def seconds_left(self, cells: int, seconds: float) -> float:
        """Return the seconds until one is due, given cells and seconds since the last; 0: now."""
        if 0 < self.cells <= cells:
            return 0.0
        return max(0.0, self.every - seconds) if self.every > 0 else float("inf")


class AutoCheckpoint:
    """Makes automatic checkpoints of one session.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    kernel : KernelConnection
    requests : CheckpointRequests
    history : CheckpointHistory
    checkpoints : CheckpointCatalog
    rule : AutoCheckpointRule
    """

    def __init__(
        self,
        core: SessionCore,
        state: DeviceState,
        kernel: KernelConnection,
        requests: CheckpointRequests,
        history: CheckpointHistory,
        checkpoints: CheckpointCatalog,
        rule: AutoCheckpointRule,
    ) -> None:
        self.rule = rule
        #: Why the last attempt failed, so that recent work is not saved; "" if it did not fail.
        self.problem = ""
        self._core, self._state, self._kernel = core, state, kernel
        self._requests, self._history, self._checkpoints = requests, history, checkpoints
        core.inhibitors[Inhibitor.AUTO_CHECKPOINT] = lambda: self.making
        self._saved = 0  # cells that had ended when the last checkpoint was made
        self._tried, self._tried_at = 0, time.monotonic()  # cells and time of the last attempt
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[str] | None = None
        self._storing: str | None = None

    # ---------------------------------------------------------------- when

    @property
    def making(self) -> bool:
        """True if one is being made."""
        return self._task is not None

    @property
    def dirty(self) -> bool:
        """True if the notebook has run a cell since its last checkpoint."""
        return self._kernel.cells_ended > self._saved

    @property
    def _could_lose(self) -> bool:
        """True if the notebook has something to lose."""
        core = self._core
        lives = not core.closing and core.state is not State.FAILED
        return lives and not core.script and self.dirty

    @property
    def _kernel_absent(self) -> bool:
        """True if it would have to be resumed on its device for one."""
        used = self._state.memory.client.head > 0
        return used and self._core.state in (State.SUSPENDED, State.QUEUED)

    @property
    def _needed(self) -> bool:
        """True if the notebook has something to lose, and its kernel can be asked for it."""
        return self._could_lose and self._kernel.reachable

    def checkpoint_if_due(self) -> None:
        """Make a checkpoint if one is due, else schedule the next check."""
        self._stop_timer()
        if self._task is not None or self._kernel_absent or not self._needed:
            return  # checked again when the session has resumed
        cells = self._kernel.cells_ended - self._tried
        left = self.rule.seconds_left(cells, time.monotonic() - self._tried_at)
        if left <= 0:
            self._begin()
        elif left != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(
                max(left, 0.001), self.checkpoint_if_due
            )

    def before_rest(self) -> bool:
        """Start a checkpoint of a session that is about to be suspended: later it would have to be
        resumed for it. Return True if the suspension must wait for that.
        """
        on = self.rule.every > 0 or self.rule.cells > 0
        tried = self._kernel.cells_ended <= self._tried
        if self._task is not None or not on or tried or not self._needed:
            return False
        self._begin()
        return True

    def before_hibernation(self) -> bool:
        """Do as `before_rest` before a hibernation; a suspended session stays suspended."""
        return not self._kernel_absent and self.before_rest()

    def set_rule(self, every: float, cells: int) -> None:
        """Set other intervals, until the kernel ends."""
        self.rule = replace(self.rule, every=max(0.0, every), cells=max(0, cells))
        self._tried, self._tried_at = self._kernel.cells_ended, time.monotonic()
        self.problem = ""
        self._core.persist()
        self.checkpoint_if_due()

    def continue_from(self, before: AutoCheckpoint) -> None:
        """Take over the rule of a kernel that a process replaces, with all its cells saved."""
        self.rule = before.rule
        self._saved = self._tried = self._kernel.cells_ended

    def note_started(self, name: str, *, by_itself: bool) -> Callable[[], object]:
        """Note that the kernel hands over a checkpoint; return what to call once it is stored.

        `by_itself`: it is an automatic one.
        """
        cells, self._storing = self._kernel.cells_ended, name

        def stored() -> None:
            self._saved = self._tried = cells
            self._tried_at, self.problem = time.monotonic(), ""
            self._core.persist()
            self.checkpoint_if_due()
            if not by_itself:
                self._history.note_use()

        return stored

    # ---------------------------------------------------------------- making one

    def _begin(self) -> asyncio.Task[str]:
        self._stop_timer()
        if self._task is None:
            self._task = asyncio.create_task(self._make(), name=f"automatic {self._core.id}")
            self._task.add_done_callback(self._ended)
        return self._task

    async def _make(self) -> str:
        """Make one, and delete those that it replaces; return its name."""
        core, self._storing = self._core, None
        self._tried, self._tried_at = self._kernel.cells_ended, time.monotonic()
        name = await self._checkpoints.automatic_name(core.owner, core.name)
        await self._requests.ask(Checkpoint(core.id, name, automatic=True))
        try:
            for each in surplus(await self._history.mine(), core.id, self.rule.keep):
                await self._checkpoints.delete_unread(core.owner, each)
        except StoreError as error:
            raise ControlError(
                f"Saved {name}, but could not delete older ones: {error}", error.reason
            ) from error
        return name

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._task = None
        if self._core.closing or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.problem = str(error)
            unexpected = None if isinstance(error, SingError | OSError) else error
            log.warning(
                "Session %s: no automatic checkpoint: %s",
                self._core.id,
                error,
                exc_info=unexpected,
            )
        self.checkpoint_if_due()
        self._core.request_reconcile()  # a hibernation may have waited for this

    async def before_end(self, seconds: float, turn: asyncio.Lock) -> tuple[str, str]:
        """Make one before the daemon ends, if the notebook has something to lose.

        Parameters
        ----------
        seconds : float
            How long to wait for the running cell, and for the device.
        turn : Lock
            Held while a hibernating session is woken for its checkpoint: all of them at once may
            not fit into memory, and would only delay each other.

        Returns
        -------
        tuple of str
            The name of the checkpoint, and why it could not be made; both "" if none is needed.
        """
        if not self._core.inhibited(Inhibitor.HIBERNATION):
            return await self._before_end(seconds)
        async with turn:
            return await self._before_end(seconds)

    async def _before_end(self, seconds: float) -> tuple[str, str]:
        """Do as `before_end`, without waiting for other sessions."""
        asleep = self._core.inhibited(Inhibitor.HIBERNATION)
        if not (self._could_lose and asleep) and not self._needed:
            return "", ""
        name = self._core.name
        task = self._begin()  # a hibernating session is woken for it, and is not busy
        await asyncio.wait({task}, timeout=STORE_SECONDS if asleep else seconds)
        if not task.done() and self._storing is not None:
            await asyncio.wait({task}, timeout=STORE_SECONDS)
        if not task.done():
            why = "storing took too long" if self._storing else f"it was busy for {seconds:g} s"
            return "", f"{name}: {why}."
        if task.cancelled():
            return "", f"{name}: its session ended."
        error = task.exception()
        return ("", f"{name}: {error}") if error is not None else (task.result(), "")

    # ---------------------------------------------------------------- state, its record, its end

    def describe(self) -> AutomaticView:
        """Return ``automatic`` of ``openapi.yaml``."""
        rule = self.rule
        return {
            "every": rule.every,
            "cells": rule.cells,
            "keep": rule.keep,
            "problem": self.problem,
        }

    def record(self) -> dict[str, Any]:
        """Return what `recover` needs, as JSON."""
        return {
            "rule": asdict(self.rule),
            "saved": self._saved,
            "tried": self._tried,
            "tried_at": self._tried_at,
            "problem": self.problem,
        }

    def recover(self, record: dict[str, Any]) -> None:
        """Recover from the record of an agent that died."""
        self.rule = AutoCheckpointRule(**record["rule"])
        self._saved, self._tried = record["saved"], record["tried"]
        self._tried_at, self.problem = record["tried_at"], record["problem"]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """Cancel the one that is being made, and make no more."""
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
