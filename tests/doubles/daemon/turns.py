"""Controller double that lets the sessions of a device take turns."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import DecisionView, PolicyEffect, SharingView
from kernelproxy.common.scheduler_api import Actions, SessionDescription, SessionOutlook


class Turns:
    """Round-robin turns: a holder is preempted only while others wait.

    Parameters
    ----------
    quantum : float
        Seconds.
    """

    keeps = False

    def __init__(self, quantum: float) -> None:
        self.quantum = quantum
        # Higher than the tokens of an agent that died.
        self.tokens = itertools.count(time.monotonic_ns())
        self.queues: dict[str, deque[str]] = {}
        self.device: dict[str, str] = {}
        self.holders: dict[str, tuple[str, int]] = {}  # by device

    def begin(self, actions: Actions, devices: dict[str, int]) -> None:
        self.actions = actions
        self.queues = {each: deque() for each in devices}

    def opened(self, terms: SessionDescription) -> None:
        self.device[terms.session] = terms.device

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        pass

    def changed(self, terms: SessionDescription) -> None:
        pass

    def admits(self, user: str) -> str:
        return ""

    def closed(self, session: str) -> None:
        if self.device.get(session):
            self.done(session)
            del self.device[session]

    def wants(self, session: str) -> None:
        self.queues[self.device[session]].append(session)
        self.actions.explain(session, "Waiting for the others.")
        self.next(self.device[session])

    def done(self, session: str) -> None:
        device = self.device[session]
        if session in self.queues[device]:
            self.queues[device].remove(session)
        self.free(session)

    def free(self, session: str) -> None:
        device = self.device[session]
        if self.holders.get(device, ("", 0))[0] == session:
            del self.holders[device]
            self.next(device)

    def next(self, device: str) -> None:
        queue = self.queues[device]
        if queue and device not in self.holders:
            session, token = queue.popleft(), next(self.tokens)
            self.holders[device] = (session, token)
            self.actions.grant(session, device, token)

    def started(self, session: str, token: int) -> None:
        assert self.holders[self.device[session]] == (session, token)
        loop = asyncio.get_running_loop()
        loop.call_later(self.quantum, self.over, session, token)

    def over(self, session: str, token: int) -> None:
        device = self.device.get(session, "")
        if self.holders.get(device) != (session, token):
            return
        if self.queues[device]:
            self.actions.preempt(session, token)
        else:
            asyncio.get_running_loop().call_later(self.quantum, self.over, session, token)

    def released(self, session: str, token: int) -> None:
        if session in self.device:
            self.queues[self.device[session]].append(session)
            self.free(session)

    def lost(self, session: str, why: str = "") -> None:
        device = self.device[session]
        if session not in self.queues[device]:
            self.queues[device].append(session)
        self.free(session)
        self.next(device)

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        before = self.device[session]
        held = self.holders.get(before, ("", 0))[0] == session
        waits = session in self.queues[before]
        if held:
            self.queues[device].append(session)
        elif waits:
            self.queues[before].remove(session)
            self.queues[device].append(session)
        self.free(session)
        self.device[session] = device
        if waits or held:
            self.next(device)

    def evicted(self, session: str, device: str) -> None:
        pass

    def refused(self, session: str, token: int, why: str) -> None:
        raise AssertionError(why)

    def device_changed(self, device: str, *, failed: bool) -> None:
        pass

    def stayed(self, session: str, device: str, why: str) -> None:
        raise AssertionError(why)

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        assert memory >= 0
        assert seconds >= 0

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        assert nbytes >= 0
        assert seconds >= 0
        if said := os.environ.get("TURNS_SWITCHED"):
            with open(said, "a", encoding="utf-8") as file:
                print(device, nbytes, file=file)

    def contended(self, session: str) -> bool:
        return bool(self.queues[self.device[session]])

    def outlook(self, session: str) -> SessionOutlook | None:
        queue = self.queues[self.device[session]]
        if session not in queue:
            return None
        place = queue.index(session) + 1
        return SessionOutlook(place, place * self.quantum, "Waiting for the others.")

    def sharing(self) -> SharingView:
        return {}

    def policy(self) -> str:
        return ""

    def apply(self, text: str, *, dry: bool) -> PolicyEffect:
        raise ControlError("There is no policy.", "unavailable")

    def decisions(self, session: str, count: int) -> list[DecisionView]:
        raise ControlError("Nothing is written down.", "unavailable")

    async def close(self) -> None:
        pass
