"""Checkpoints that nobody asks for: when one is made, and which of the older ones may go.

A kernel makes a checkpoint when the agent wishes for one, as soon as no cell runs. Here is decided
when that is. What counts is what was run: a notebook that has run nothing since its last checkpoint
gets no other one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kernelproxy.agent.checkpoint.retention import surplus
from kernelproxy.agent.session.states import State
from kernelproxy.common.errors import ControlError, SingError, StoreError
from kernelproxy.common.protocol import Checkpoint

if TYPE_CHECKING:
    from kernelproxy.agent.checkpoint.catalog import Checkpoints
    from kernelproxy.agent.session.session import Session

log = logging.getLogger(__name__)

#: How long a checkpoint before the daemon's end may take that has begun.
STORE_SECONDS = 600.0


@dataclass(frozen=True)
class Rule:
    """When checkpoints are made by themselves.

    Parameters
    ----------
    every : float
        Seconds between two; 0 or less: time is no reason.
    cells : int
        Cells between two; 0 or less: cells are no reason.
    keep : int
        How many are kept, see `surplus`.
    """

    every: float = 0.0
    cells: int = 0
    keep: int = 3

    def seconds_left(self, cells: int, seconds: float) -> float:
        """Seconds until one is due, so many cells and seconds after the last; 0: now."""
        if 0 < self.cells <= cells:
            return 0.0
        return max(0.0, self.every - seconds) if self.every > 0 else float("inf")


class Automatic:
    """Makes automatic checkpoints of one session.

    Parameters
    ----------
    session : Session
    checkpoints : Checkpoints
    rule : Rule
    """

    def __init__(self, session: Session, checkpoints: Checkpoints, rule: Rule) -> None:
        self.rule = rule
        #: Why there is none of what was run since the last one; "" if nothing failed.
        self.problem = ""
        self._session, self._checkpoints = session, checkpoints
        self._saved = 0  # cells that had ended when the last checkpoint was made
        self._tried, self._tried_at = 0, time.monotonic()  # the same of the last attempt
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[str] | None = None
        self._begun: str | None = None

    # ---------------------------------------------------------------- when

    @property
    def making(self) -> bool:
        """Whether one is being made."""
        return self._task is not None

    @property
    def dirty(self) -> bool:
        """Whether the notebook has run a cell since its last checkpoint."""
        return self._session.kernel.cells_ended > self._saved

    @property
    def _could_lose(self) -> bool:
        """Whether the notebook has something to lose."""
        session = self._session
        lives = not session.closing and session.state is not State.FAILED
        return lives and not session.script and self.dirty

    @property
    def _away(self) -> bool:
        """Whether it would have to come back to its device for one."""
        used = self._session.device_state.memory.client.head > 0
        return used and self._session.state in (State.SUSPENDED, State.QUEUED)

    @property
    def _needed(self) -> bool:
        """Whether the notebook has something to lose, and can be asked for it."""
        return self._could_lose and self._session.kernel.hears

    def tend(self) -> None:
        """Make a checkpoint if one is due, else look again when, as it looks now, one will be."""
        self._stop_timer()
        if self._task is not None or self._away or not self._needed:
            return  # looked at again when it is back
        cells = self._session.kernel.cells_ended - self._tried
        left = self.rule.seconds_left(cells, time.monotonic() - self._tried_at)
        if left <= 0:
            self._begin()
        elif left != float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self.tend)

    def before_rest(self) -> bool:
        """Begin one of a session that is to be suspended, as it would have to come back for it;
        return whether that is to wait.
        """
        on = self.rule.every > 0 or self.rule.cells > 0
        tried = self._session.kernel.cells_ended <= self._tried
        if self._task is not None or not on or tried or not self._needed:
            return False
        self._begin()
        return True

    def before_hibernation(self) -> bool:
        """As `before_rest`, of one that is to hibernate: if it is suspended, it stays so."""
        return not self._away and self.before_rest()

    def set_rule(self, every: float, cells: int) -> None:
        """Go by other intervals from now on, until the kernel ends."""
        self.rule = replace(self.rule, every=max(0.0, every), cells=max(0, cells))
        self._tried, self._tried_at = self._session.kernel.cells_ended, time.monotonic()
        self.problem = ""
        self._session.deposit()
        self.tend()

    def goes_on_from(self, before: Automatic) -> None:
        """Begin as that of a kernel whose place a process takes, with all its cells saved."""
        self.rule = before.rule
        self._saved = self._tried = self._session.kernel.cells_ended

    def begun(self, name: str) -> Callable[[], object]:
        """The kernel hands over a checkpoint; returns what is to be called when it is stored."""
        cells, self._begun = self._session.kernel.cells_ended, name

        def stored() -> None:
            self._saved = self._tried = cells
            self._tried_at, self.problem = time.monotonic(), ""
            self._session.deposit()
            self.tend()

        return stored

    # ---------------------------------------------------------------- making one

    def _begin(self) -> asyncio.Task[str]:
        self._stop_timer()
        if self._task is None:
            self._task = asyncio.create_task(self._make(), name=f"automatic {self._session.id}")
            self._task.add_done_callback(self._ended)
        return self._task

    async def _make(self) -> str:
        """Make one, and forget those that it replaces; returns its name."""
        session, self._begun = self._session, None
        self._tried, self._tried_at = session.kernel.cells_ended, time.monotonic()
        name = await self._checkpoints.automatic_name(session.owner, session.name)
        await session.checkpointing.ask(Checkpoint(session.id, name, automatic=True))
        try:
            for each in surplus(await session.past.mine(), session.id, self.rule.keep):
                await self._checkpoints.delete_unread(session.owner, each)
        except StoreError as error:
            raise ControlError(
                f"Saved {name}, but could not delete older ones: {error}", error.reason
            ) from error
        return name

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._task = None
        if self._session.closing or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self.problem = str(error)
            unexpected = None if isinstance(error, SingError | OSError) else error
            log.warning(
                "Session %s: no automatic checkpoint: %s",
                self._session.id,
                error,
                exc_info=unexpected,
            )
        self.tend()
        self._session.look()  # perhaps it was to hibernate

    async def before_end(self, seconds: float, turn: asyncio.Lock) -> tuple[str, str]:
        """Make one before the daemon ends, of a notebook that can be lost.

        Parameters
        ----------
        seconds : float
            How long to wait for the cell that runs, and for the device.
        turn : Lock
            Held by one that comes back for it: all who hibernate may not fit into memory at once,
            and would only hold each other up.

        Returns
        -------
        tuple of str
            The name of the checkpoint, and why there is none; both "" if none is needed.
        """
        if not self._session.hibernation.asleep:
            return await self._before_end(seconds)
        async with turn:
            return await self._before_end(seconds)

    async def _before_end(self, seconds: float) -> tuple[str, str]:
        """As `before_end`, without waiting for others."""
        asleep = self._session.hibernation.asleep
        if not (self._could_lose and asleep) and not self._needed:
            return "", ""
        name = self._session.name
        task = self._begin()  # one that hibernates comes back for it, and is not busy
        await asyncio.wait({task}, timeout=STORE_SECONDS if asleep else seconds)
        if not task.done() and self._begun is not None:
            await asyncio.wait({task}, timeout=STORE_SECONDS)
        if not task.done():
            why = "storing took too long" if self._begun else f"it was busy for {seconds:g} s"
            return "", f"{name}: {why}."
        if task.cancelled():
            return "", f"{name}: its session ended."
        error = task.exception()
        return ("", f"{name}: {error}") if error is not None else (task.result(), "")

    # ---------------------------------------------------------------- keeping track

    def describe(self) -> dict[str, Any]:
        """See ``automatic`` in ``openapi.yaml``."""
        return {**asdict(self.rule), "problem": self.problem}

    def record(self) -> dict[str, Any]:
        """What `adopt` needs, in JSON."""
        return {
            "rule": asdict(self.rule),
            "saved": self._saved,
            "tried": self._tried,
            "tried_at": self._tried_at,
            "problem": self.problem,
        }

    def adopt(self, record: dict[str, Any]) -> None:
        """Go on where the agent was that died."""
        self.rule = Rule(**record["rule"])
        self._saved, self._tried = record["saved"], record["tried"]
        self._tried_at, self.problem = record["tried_at"], record["problem"]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """Make no more."""
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
