"""Start-time fair queueing in a tree: virtual cluster, user, session.

A *flow* is a node of the tree. Its *tag* is the weighted service that it has had: it grows by
`devices / weight` a second while the flow holds devices, loading and moving included. The flow with
the least tag among its siblings is owed the most. The *virtual time* of siblings is the least tag
of those that are active, that is, hold devices or wait for some. A flow that becomes active starts
at the virtual time at least: being idle earns nothing.

Source: Goyal, Vin, Cheng, "Start-time fair queueing", SIGCOMM 1996, with the service charged that
was really given instead of an estimate.

Tags of running flows change all the time, so no heap can be ordered by them. But all flows that run
at the same slope keep their order, and the number of different slopes is small: there is one heap
per slope, of tags at time zero.
"""

from __future__ import annotations

import heapq
from typing import Any

from jupyter_sing.scheduler.fairness.quotas import Day, Quota


class Siblings:
    """The children of one node of the tree, and their virtual time."""

    __slots__ = ("_active", "_furthest", "_heaps", "_known_at", "_reached")

    def __init__(self) -> None:
        self._known_at: float | None = (
            None  # when `_reached` was computed, if nothing changed since
        )
        self._reached = 0.0
        self._furthest = 0.0
        self._active = 0
        # By slope: (tag at time zero, number, version, flow). Entries of older versions are stale.
        self._heaps: dict[float, list[tuple[float, int, int, Flow]]] = {}

    def virtual_time(self, now: float) -> float:
        """Return the least tag of the active siblings; it never decreases."""
        if self._known_at == now:
            return self._reached
        self._known_at = now
        least: float | None = None
        for slope in list(self._heaps):
            heap = self._heaps[slope]
            while heap and heap[0][2] != heap[0][3].version:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[slope]
                continue
            tag = heap[0][0] + slope * now
            if least is None or tag < least:
                least = tag
        if least is not None and least > self._reached:
            self._reached = least
        return self._reached

    def times(self, now: float) -> tuple[float, float]:
        """Return the virtual time, and the furthest tag of all flows that were active."""
        return self.virtual_time(now), self._furthest

    def restore(self, reached: float, furthest: float) -> None:
        """Continue from what `times` has returned."""
        self._reached, self._furthest = reached, furthest

    def _enter(self, flow: Flow) -> None:
        self._known_at = None
        slope = flow.slope
        heap = self._heaps.setdefault(slope, [])
        heapq.heappush(heap, (flow.tag - slope * flow.since, flow.number, flow.version, flow))
        if len(heap) > 4 * self._active + 64:
            heap[:] = [entry for entry in heap if entry[2] == entry[3].version]
            heapq.heapify(heap)

    def activate(self, flow: Flow, now: float) -> None:
        """Make an inactive flow active."""
        flow.settle(now)
        flow.tag = max(flow.tag, self.virtual_time(now))
        flow.version += 1
        self._active += 1
        self._enter(flow)

    def change(self, flow: Flow, devices: float, now: float) -> None:
        """Let an active flow hold this many more devices (fewer, if negative)."""
        flow.settle(now)
        flow.devices = max(0.0, flow.devices + devices)
        flow.version += 1
        self._enter(flow)

    def deactivate(self, flow: Flow, now: float) -> None:
        """Make an active flow inactive."""
        flow.settle(now)
        self.virtual_time(now)
        self._known_at = None
        flow.version += 1
        self._active -= 1
        self._furthest = max(self._furthest, flow.tag)
        if not self._active:
            # No sibling is left that could be owed service: a busy period ends without debts.
            self._reached = max(self._reached, self._furthest)


class Flow:
    """Node of the fairness tree: a virtual cluster, a user or a session.

    Attributes
    ----------
    tag
        Weighted service at time `since`.
    served
        Device seconds it had until `since`, unweighted: what accounting reports.
    devices
        How many it holds now; a device that is shared by two counts half for each.
    backlog
        Sessions below it that hold devices or wait for some.
    burst
        Interactive seconds, as of `burst_at`, that are not yet paid back to its allowance.
    origin
        The same user in another virtual cluster, whose history this one has inherited: tags of
        their sessions can be compared.
    day
        Device seconds of the last 24 hours; None for sessions.
    quota
        Its use of resources and its limits; None for sessions.
    """

    __slots__ = (
        "backlog",
        "burst",
        "burst_at",
        "children",
        "day",
        "devices",
        "name",
        "number",
        "origin",
        "parent",
        "quota",
        "served",
        "since",
        "tag",
        "version",
        "weight",
    )

    def __init__(self, name: str, number: int, weight: float, parent: Flow | None) -> None:
        self.name = name
        self.number = number
        self.weight = weight
        self.parent = parent
        self.children = Siblings()
        self.tag = 0.0
        self.served = 0.0
        self.since = 0.0
        self.devices = 0.0
        self.backlog = 0
        self.version = 0
        self.burst = 0.0
        self.burst_at = 0.0
        self.origin: Flow | None = None
        self.day: Day | None = None
        self.quota: Quota[Flow, Any] | None = None

    @property
    def quotas(self) -> tuple[Quota[Flow, Any], Quota[Flow, Any]]:
        """Quotas of the user and of the virtual cluster of a session."""
        user = self.parent
        assert user
        assert user.quota
        assert user.parent
        assert user.parent.quota
        return user.quota, user.parent.quota

    @property
    def slope(self) -> float:
        """Growth of its tag per second."""
        return self.devices / self.weight

    def at(self, now: float) -> float:
        """Return its tag at a time that is not before `since`."""
        return self.tag + self.devices * (now - self.since) / self.weight

    def settle(self, now: float) -> None:
        """Bring tag and service up to date."""
        if now > self.since:
            used = self.devices * (now - self.since)
            self.served += used
            self.tag += used / self.weight
            if used and self.day is not None:
                self.day.add(self.since, now, self.devices)
        self.since = now

    def used(self, now: float) -> float:
        """Return the device seconds that a user or virtual cluster had in the last 24 hours."""
        assert self.day
        return self.day.used(now) + self.devices * (now - self.since)


class ServiceLedger:
    """The tree of flows, and the operations on a session that concern the path to the root."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._active = 0
        self.root = Siblings()
        self._clusters: dict[str, Flow] = {}
        self._users: dict[tuple[str, str], Flow] = {}
        self._count = 0
        self.relieved: dict[Flow, None] = {}  # flows whose waiting sessions may fit now

    def _new(self, name: str, weight: float, parent: Flow | None) -> Flow:
        self._count += 1
        return Flow(name, self._count, weight, parent)

    def _with_quota(self, flow: Flow, whose: str) -> Flow:
        flow.day, flow.quota = Day(), Quota(flow, whose, self.relieved)
        return flow

    def cluster(self, vc: str, weight: float = 1.0) -> Flow:
        """Return the flow of a virtual cluster; created at first use."""
        if vc not in self._clusters:
            flow = self._new(vc, weight, None)
            self._clusters[vc] = self._with_quota(flow, f"virtual cluster {vc}")
        return self._clusters[vc]

    def user(self, vc: str, user: str, vc_weight: float = 1.0, weight: float = 1.0) -> Flow:
        """Return the flow of a user; created at first use."""
        if (vc, user) not in self._users:
            flow = self._new(user, weight, self.cluster(vc, vc_weight))
            self._users[vc, user] = self._with_quota(flow, user)
        return self._users[vc, user]

    def session(self, name: str, user: Flow, weight: float) -> Flow:
        """Create the flow of a session."""
        return self._new(name, weight, user)

    def flows(self) -> list[Flow]:
        """Return all virtual clusters and users, in the order of their first use."""
        return [*self._clusters.values(), *self._users.values()]

    @staticmethod
    def _is_user(flow: Flow) -> bool:
        return flow.parent is not None and flow.parent.parent is None

    def _siblings(self, flow: Flow) -> Siblings:
        return flow.parent.children if flow.parent else self.root

    def activate(self, session: Flow, now: float) -> None:
        """Record that a session begins to hold devices or to wait for some."""
        flow: Flow | None = session
        while flow:
            flow.backlog += 1
            if flow.backlog == 1:
                self._active += self._is_user(flow)
                self._siblings(flow).activate(flow, now)
            flow = flow.parent

    def deactivate(self, session: Flow, now: float) -> None:
        """Record that a session neither holds devices nor waits for any."""
        flow: Flow | None = session
        while flow:
            flow.backlog -= 1
            if flow.backlog == 0:
                self._active -= self._is_user(flow)
                self._siblings(flow).deactivate(flow, now)
            flow = flow.parent

    def hold(self, session: Flow, devices: float, now: float) -> None:
        """Charge an active session for this many more devices from now on (fewer, if negative)."""
        flow: Flow | None = session
        while flow:
            self._siblings(flow).change(flow, devices, now)
            flow = flow.parent

    def move(self, session: Flow, user: Flow, now: float) -> None:
        """Move a session to another user, with its lead over the virtual time and its devices.

        A user who is new in that virtual cluster inherits their history in the previous one.
        """
        before = session.parent
        assert before
        if user.served == 0.0 and not user.backlog and user.name == before.name:
            _inherit(before, user, now)
        tag = session.at(now)
        if user.origin is not before:
            tag += user.children.virtual_time(now) - before.children.virtual_time(now)
        devices, active = session.devices, session.backlog > 0
        if devices:
            self.hold(session, -devices, now)
        if active:
            self.deactivate(session, now)
        session.parent = user
        session.tag = max(tag, user.children.virtual_time(now))
        session.since = now
        if active:
            self.activate(session, now)
        if devices:
            self.hold(session, devices, now)

    def reweigh(self, flow: Flow, weight: float, now: float) -> None:
        """Change a share. Service that was charged before stays as it was counted."""
        if weight != flow.weight:
            flow.settle(now)
            flow.weight = weight
            if flow.backlog:
                self._siblings(flow).change(flow, 0.0, now)

    def lead(self, flow: Flow, now: float) -> float:
        """Return by how much weighted service a flow is ahead of its siblings' virtual time."""
        return flow.at(now) - self._siblings(flow).virtual_time(now)

    def burst(self, user: Flow, seconds: float, now: float) -> float:
        """Charge a user for interactive service; return the seconds that are not yet paid back.

        They are paid back, as time passes, at half of a user's present fair share. A user who sends
        nothing but bursts therefore gets no more than the others in the long run.

        Notes
        -----
        Start-time fair queueing alone makes an honest user's short cell wait for as long as that
        user had long cells while others waited: minutes, where a second is promised.
        """
        user.burst = self.unpaid(user, now) + seconds
        user.burst_at = now
        return user.burst

    def unpaid(self, user: Flow, now: float) -> float:
        """Return what `burst` would return for 0 seconds, without side effects."""
        share = min(1.0, 0.5 * self._devices / max(1, self._active))
        return max(0.0, user.burst - share * (now - user.burst_at))


def _inherit(before: Flow, user: Flow, now: float) -> None:
    """Let a user continue in another virtual cluster with their history in the previous one."""
    assert before.parent
    assert before.day
    assert user.parent
    assert user.day
    before.settle(now)
    lead = max(0.0, before.tag - before.parent.children.virtual_time(now))
    user.tag = user.parent.children.virtual_time(now) + lead
    user.burst, user.burst_at = before.burst, before.burst_at
    user.since, user.origin = now, before
    user.children.restore(*before.children.times(now))
    for slot, seconds in before.day.slots():
        user.day.put(slot, seconds)
