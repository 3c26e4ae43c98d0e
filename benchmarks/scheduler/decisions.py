"""Time of one scheduling decision: 10,000 sessions on 1,000 devices.

Run with ``python -m benchmarks.scheduler.decisions``; ``python -m benchmarks.scheduler`` reports
the same figures.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Evict, Grant, MigrateMemory, Preempt
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.settings import DeviceSpec, Tier

GB = 10**9


@dataclass(frozen=True)
class DecisionTimes:
    """Seconds of CPU time per call of `Engine.handle`.

    CPU time, so that other work of the machine does not affect it.
    """

    sessions: int
    devices: int
    events: int
    p50: float
    p99: float
    max: float


class _Load:
    """A load of notebooks with cells of seconds to minutes; decisions take effect after a delay."""

    def __init__(self, sessions: int, devices: int, seed: int) -> None:
        self.random = random.Random(seed)
        places = [
            DeviceSpec(f"node{i // 8}/gpu{i % 8}", 80 * GB, f"node{i // 8}", constant_seconds=0.1)
            for i in range(devices)
        ]
        self.engine = Engine(places)
        self.now = 0.0
        self.taken: list[float] = []
        self.log: list[str] = []
        self.left: dict[str, float] = {}
        self.token: dict[str, int] = {}
        self.began: dict[str, float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for i in range(sessions):
            name = f"s{i}"
            tier = self.random.choice((Tier.PREMIUM, Tier.STANDARD, Tier.STANDARD, Tier.BASIC))
            gpus = self.random.choices((1, 2, 4), (94, 4, 2))[0]
            memory = int(self.random.lognormvariate(2.1, 0.5) * GB)
            user = f"u{i % (sessions // 3 + 1)}"
            self.tell(
                events.SessionAdded(
                    0.0, name, f"vc{i % 20}", user, tier, gpus=gpus, memory=min(memory, 60 * GB)
                )
            )
            self.after(self.random.random() * 100.0, self._submission(name))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action))

    def tell(self, event: Event) -> None:
        begin = time.thread_time()
        decisions = self.engine.handle(event)
        self.taken.append(time.thread_time() - begin)
        for decision in decisions:
            self.log.append(repr(decision))
            if isinstance(decision, Grant):
                self.token[decision.session] = decision.token
                self.after(0.4, self._start(decision.session, decision.token))
            elif isinstance(decision, Preempt):
                self.after(0.01, self._stop(decision.session, decision.token))
            elif isinstance(decision, Evict):
                self.after(0.2, self._evicted(decision.session, decision.device))
            elif isinstance(decision, MigrateMemory):
                self.after(0.4, self._moved(decision.session, decision.target))

    def step(self) -> None:
        tick = self.engine.next_tick()
        if tick is not None and (not self._queue or tick < self._queue[0][0]):
            self.now = max(self.now, tick)
            self.tell(events.Tick(self.now))
        else:
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def _submission(self, name: str) -> Callable[[], None]:
        def submit() -> None:
            self.left[name] = self.random.lognormvariate(2.0, 1.6)
            self.tell(events.CellSubmitted(self.now, name))

        return submit

    def _start(self, name: str, token: int) -> Callable[[], None]:
        def start() -> None:
            if self.token.get(name) == token:
                self.began[name] = self.now
                self.after(self.left[name], self._finish(name, token))
                self.tell(events.Started(self.now, name, token))

        return start

    def _finish(self, name: str, token: int) -> Callable[[], None]:
        def finish() -> None:
            if self.token.get(name) == token:
                del self.token[name], self.began[name]
                self.tell(events.CellFinished(self.now, name))
                self.after(self.random.lognormvariate(4.0, 1.0), self._submission(name))

        return finish

    def _stop(self, name: str, token: int) -> Callable[[], None]:
        def stop() -> None:
            if self.token.get(name) == token:
                del self.token[name]
                ran = self.now - self.began.pop(name, self.now)
                self.left[name] = max(0.01, self.left[name] - ran)
                self.tell(events.Released(self.now, name, token))

        return stop

    def _evicted(self, name: str, device: str) -> Callable[[], None]:
        return lambda: self.tell(events.Evicted(self.now, name, device))

    def _moved(self, name: str, device: str) -> Callable[[], None]:
        return lambda: self.tell(events.Moved(self.now, name, device))


def measure(
    sessions: int = 10_000, devices: int = 1_000, count: int = 50_000, seed: int = 1
) -> DecisionTimes:
    """Feed an engine with events of a busy cluster, and time each."""
    load = _Load(sessions, devices, seed)
    for _ in range(3 * sessions):  # all sessions have begun: devices are full, sessions wait
        load.step()
    load.taken.clear()
    while len(load.taken) < count:
        load.step()
    taken = sorted(load.taken)
    return DecisionTimes(
        sessions,
        devices,
        len(taken),
        taken[len(taken) // 2],
        taken[int(0.99 * (len(taken) - 1))],
        taken[-1],
    )


def decisions_of(sessions: int, devices: int, count: int, seed: int) -> list[str]:
    """Return the decisions for a number of events, for comparison."""
    load = _Load(sessions, devices, seed)
    while len(load.taken) < count:
        load.step()
    return load.log


if __name__ == "__main__":
    json.dump(measure().__dict__, sys.stdout, indent=1)
    sys.stdout.write("\n")
