"""Tiers: which fraction of its device time demand a session gets within an hour.

`F = granted / demand`, where demand is the time in which a session has a cell, and granted the time
of it in which the cell executed. The order of service depends on the hour until now.

Whether a target was met is judged once per hour, at its end. An hour of a session begins when it
needs a device and the previous hour is over. In this judgement, a session gets the time for which
it held a device, as it is charged for it, so loading its memory does not count as lost. A fraction
below the target counts as missed only if more than `LOST_MIN` seconds were lost: of a cell that
takes 50 ms, any wait is most of the time.

Source: Singularity's GPU fractions (2202.07848); how they are reached is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jupyter_sing.scheduler.settings import TARGETS, Tier

WINDOW = 3600.0
SLOT = 60.0
SLOTS = int(WINDOW / SLOT)
LOST_MIN = 2.0
LOOKAHEAD = 10.0
"""Longest quantum that is waited for before a session is promoted, in seconds."""


@dataclass(slots=True)
class Tally:
    """Number of hours in which a session got less than its target: `missed`."""

    missed: int = 0


class Account:
    """Demand and granted seconds of one session in the last hour, in slots of a minute.

    Attributes
    ----------
    goal
        The target fraction; 0: none.
    tally
        Counter of the hours in which the target was missed.
    """

    __slots__ = (
        "_demand", "_ends", "_got", "_granted", "_mode", "_requested", "_since", "_slot",
        "demand", "goal", "granted", "tally",
    )  # fmt: skip

    def __init__(self, at: float) -> None:
        self._demand: list[float] = []  # made at the first use: most sessions are idle most days
        self._granted: list[float] = []
        self._slot = int(at / SLOT)
        self._since = at
        self._mode = 0  # 0 idle, 1 waiting, 2 executing, 3 holding a device that is prepared
        self.demand = 0.0
        self.granted = 0.0
        self.goal = 0.0
        self.tally: Tally | None = None
        self._ends: float | None = None  # end of the hour that is judged next
        self._requested = self._got = 0.0  # in that hour

    def set_goal(self, goal: float, now: float) -> None:
        """Set another target; a new hour begins."""
        if goal != self.goal:
            self.settle(now)
            self.goal, self._ends = goal, None

    def _judge(self, now: float) -> None:
        """Add the time since the last `settle`, and judge the hours that end in it."""
        at = self._since
        while at < now:
            if self._ends is None:
                if not self._mode:
                    return
                self._ends, self._requested, self._got = at + WINDOW, 0.0, 0.0
            end = min(now, self._ends)
            self._requested += end - at if self._mode else 0.0
            self._got += end - at if self._mode > 1 else 0.0
            at = end
            if at < self._ends:
                return
            self._ends = None
            lost = self._requested - self._got
            if self.tally and self.goal and lost > _may_lose(self._requested, self.goal):
                self.tally.missed += 1

    def _advance(self, slot: int) -> None:
        """Clear the slots that leave the window."""
        for past in range(self._slot + 1, min(slot, self._slot + SLOTS) + 1):
            place = past % SLOTS
            self.demand = max(0.0, self.demand - self._demand[place])
            self.granted = max(0.0, self.granted - self._granted[place])
            self._demand[place] = self._granted[place] = 0.0
        self._slot = max(self._slot, slot)

    def settle(self, now: float) -> None:
        """Bring the sums up to date."""
        if not self._demand:
            self._since = now
            self._slot = int(now / SLOT)
            return
        self._judge(now)
        begin = max(self._since, now - WINDOW)
        while begin < now:
            slot = int(begin / SLOT)
            end = min(now, (slot + 1) * SLOT)
            self._advance(slot)
            if self._mode:
                self._demand[slot % SLOTS] += end - begin
                self.demand += end - begin
                if self._mode == 2:
                    self._granted[slot % SLOTS] += end - begin
                    self.granted += end - begin
            if end <= begin:  # a slot shorter than the resolution of the clock
                break
            begin = end
        self._since = now

    def _enter(self, mode: int, now: float) -> None:
        if not self._demand:
            self._demand = [0.0] * SLOTS
            self._granted = [0.0] * SLOTS
            self._since = now
            self._slot = int(now / SLOT)
        self.settle(now)
        self._mode = mode

    def slots(self) -> Iterator[tuple[float, float, float]]:
        """Yield middle, demand and granted seconds of the slots of the last hour, oldest first."""
        for slot in range(self._slot - SLOTS + 1, self._slot + 1) if self._demand else ():
            place = slot % SLOTS
            if self._demand[place]:
                yield (slot + 0.5) * SLOT, self._demand[place], self._granted[place]

    def restore(self, slots: Sequence[tuple[float, float, float]], now: float) -> None:
        """Restore slots of (age, demand, granted)."""
        self._enter(0, now)
        for age, demand, granted in slots:
            slot = math.floor((now - age) / SLOT)
            if self._slot - SLOTS < slot <= self._slot and demand:
                self._demand[slot % SLOTS] += demand
                self._granted[slot % SLOTS] += min(demand, granted)
                self.demand += demand
                self.granted += min(demand, granted)
                self._ends = self._ends or max(now, slot * SLOT + WINDOW)
        self._requested, self._got = self.demand, self.granted

    def wait(self, now: float) -> None:
        """Record that it has a cell that does not execute."""
        self._enter(1, now)

    def hold(self, now: float) -> None:
        """Record that it holds a device, to which its memory is loaded."""
        self._enter(3, now)

    def execute(self, now: float) -> None:
        """Record that its cell executes."""
        self._enter(2, now)

    def rest(self, now: float) -> None:
        """Record that it has no cell."""
        self._enter(0, now)

    @property
    def fraction(self) -> float:
        """F of the last hour, as of the last `settle`; 1 without demand."""
        return self.granted / self.demand if self.demand > 0.0 else 1.0

    def slack(self, target: float) -> float:
        """Return the seconds that it may still lose before its target is missed, as of `settle`."""
        return _may_lose(self.demand, target) - (self.demand - self.granted)

    def slack_at(self, target: float, now: float) -> float:
        """Estimate `slack` at a time from what has passed since `settle`, without side effects."""
        passed = max(0.0, now - self._since) if self._mode else 0.0
        demand = self.demand + passed
        lost = demand - self.granted - (passed if self._mode == 2 else 0.0)
        return _may_lose(demand, target) - lost


def _may_lose(demand: float, target: float) -> float:
    """Return how many seconds of a demand may be lost before the target is missed."""
    return max(LOST_MIN, (1.0 - target) * demand)


def threshold(switch: float, quantum: float) -> float:
    """Return the slack below which a session is promoted: the time until it would execute."""
    return switch + min(quantum, LOOKAHEAD)


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of the admission of a session to its tier.

    `kept`: its target can be kept. `reason` is user-facing.
    """

    tier: Tier
    kept: bool
    reason: str


def admit(
    tier: Tier,
    gpus: int,
    demand: Mapping[Tier, float],
    guaranteed: float,
    capacity: float,
    targets: Mapping[Tier, float] = TARGETS,
) -> Admission:
    """Check whether the target of one more session can be kept.

    Parameters
    ----------
    tier, gpus
        Tier of the session, and devices that it needs.
    demand
        Devices per tier that sessions admitted so far are expected to keep busy.
    guaranteed, capacity
        Devices that are guaranteed to its virtual cluster (all, without guarantees), and healthy
        devices in all.
    targets
        Target fractions.
    """
    if targets.get(tier, 0.0) <= 0.0:
        return Admission(tier, True, f"{tier.value}: runs when there is room, nothing is promised")
    premium = demand.get(Tier.PREMIUM, 0.0)
    if tier is Tier.PREMIUM and premium + gpus > guaranteed:
        return Admission(
            tier,
            False,
            f"best effort: with it, premium sessions may need {premium + gpus:g} devices at once,"
            f" and there {_are(guaranteed)} {guaranteed:g}",
        )
    committed = sum(targets.get(known, 0.0) * amount for known, amount in demand.items())
    wanted = targets[tier] * gpus
    if committed + wanted > capacity:
        return Admission(
            tier,
            False,
            f"best effort: with it, {committed + wanted:.2f} devices would be promised,"
            f" and there {_are(capacity)} {capacity:g}",
        )
    return Admission(tier, True, f"{tier.value}: {targets[tier]:.0%} of what it asks for, hourly")


def most(tier: Tier, devices: int, targets: Mapping[Tier, float], duty: float) -> float:
    """Return how many sessions of a tier can be admitted at the same time on so many devices.

    Parameters
    ----------
    tier
    devices
    targets
        Target fractions.
    duty
        Share of the time in which a session is expected to use a device.
    """
    if targets.get(tier, 0.0) <= 0.0:
        return math.inf
    count = 0
    while admit(tier, 1, {tier: count * duty}, devices, devices, targets).kept:
        count += 1
    return count


def _are(count: float) -> str:
    return "is" if count == 1 else "are"
