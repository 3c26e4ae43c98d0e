"""What is observed of a session while it has a lease, and told to the arbiter.

Its worker notes which operators it executes, and finds the step that they repeat (`Steps` in
`native/worker/loop/steps.h`). It is asked for that now and then. How fast steps follow each other
depends on who else executes on the device: they are counted from when it is these sessions.

Note [Backlog]: a program goes on while its session waits for a turn, and its log grows. Executing
that takes no longer than the device needs, which says nothing of the program's progress. Steps are
counted from when it was executed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelproxy.agent.devices.device_allocator import Room
from kernelproxy.common.scheduler_api import Arbiter

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session

#: Seconds between two looks at a session that executes.
LOOK_SECONDS = 0.5
#: So many steps, and so many seconds of them, say how fast a session is.
STEPS_MIN, STRETCH_SECONDS_MIN = 2, 0.3


@dataclass(frozen=True)
class Step:
    """What a session does again and again.

    Parameters
    ----------
    records : int
        Length of the step.
    seconds : float
        How long one took on average, since the same sessions have executed on the device.
    nadir : float
        Where in it memory is least: a fraction of its records, in [0, 1).
    memory_min : int
        Bytes in use there.
    company : frozenset of str
        Who had leases on the device then, itself among them.
    """

    records: int
    seconds: float
    nadir: float
    memory_min: int
    company: frozenset[str]


class Watch:
    """Watches one session.

    Parameters
    ----------
    session : Session
    arbiter : Arbiter
    """

    def __init__(self, session: Session, arbiter: Arbiter) -> None:
        self._session, self._arbiter = session, arbiter
        #: As last observed; None if nothing repeats.
        self.step: Step | None = None
        self._room: Room | None = None
        self._looking: asyncio.Task[None] | None = None
        self._backlog: int | None = None  # where it ends, until it was executed
        self._since = 0.0  # when it was
        self._alone = 0  # records of the step that was measured without others
        self._counted = 0.0  # seconds of execution that the arbiter was told of

    def begin(self) -> None:
        """It may execute from now on."""
        self.end()
        self._room = self._session.room
        self._room.enter(self._session.id)
        self._backlog = self._session.device_state.memory.client.head
        if not self._arbiter.keeps:
            self._looking = asyncio.create_task(self._look())

    def end(self) -> None:
        """It executes no more; saying it twice is no error."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._room is not None:
            self._room.leave(self._session.id)
            self._room = None

    @property
    def memory(self) -> int:
        """Bytes that it has in use or waits for, as its client says, which may say anything."""
        session = self._session
        state = session.device_state
        used = max(state.memory.client.memory_used, state.wish.bytes if state.wish else 0)
        return min(used, session.room.device.memory_total)

    def company(self) -> list[str]:
        """Ids of the other sessions that may execute on its device now."""
        others = self._room.lessees if self._room is not None else ()
        return [each for each in others if each != self._session.id]

    def measure(self) -> None:
        """Tell the arbiter what it has used, and how fast it is."""
        executed, step = self._session.device_state.busy_seconds, self._comparable()
        used, self._counted = max(executed - self._counted, 0.0), executed
        self._arbiter.measured(
            self._session.id,
            self.memory,
            used,
            step.seconds if step is not None else None,
            step.nadir if step is not None else None,
        )

    def _comparable(self) -> Step | None:
        """Return its step if what is known of it is so in the present company.

        Beside others, only the step that was measured alone says what they cost.
        """
        step, others = self.step, self.company()
        if step is None or step.company != frozenset((self._session.id, *others)):
            return None
        return None if others and step.records != self._alone else step

    async def _look(self) -> None:
        """Look at it again and again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._observe()
            self.measure()

    async def _observe(self) -> None:
        if self._room is not None and self._room is not self._session.room:  # it has moved
            self._room.leave(self._session.id)
            self._room = self._session.room
            self._room.enter(self._session.id)
        room, worker = self._room, self._session.device_state.worker
        if room is None or worker is None or not self._caught_up():
            return
        asked = time.monotonic()
        found = await worker.observe(max(room.lessees_since, self._since))
        if found is None or room.lessees_since > asked:
            return
        if not found.records:
            self.step = None
        elif found.made >= STEPS_MIN * found.records and found.seconds >= STRETCH_SECONDS_MIN:
            if len(room.lessees) == 1:
                self._alone = found.records
            self.step = Step(
                found.records,
                found.seconds * found.records / found.made,
                found.nadir / found.records,
                found.memory_min,
                frozenset(room.lessees),
            )

    def _caught_up(self) -> bool:
        """Whether it has executed what was there when it began; see Note [Backlog]."""
        if self._backlog is not None:
            if self._session.device_state.memory.worker.consumed < self._backlog:
                return False
            self._backlog, self._since = None, time.monotonic()
        return True
