"""Limits of users and virtual clusters: which sessions have to wait for them, and why.

A session at a limit is passed over, and no other session waits for it. Limits take nothing away:
leases continue when a limit is lowered, and when the device time of a day is used up, they last to
the end of their quantum. Devices and device time are limits of a whole user. Memory is checked per
session, as another session of the same user may be on its device already.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from jupyter_sing.scheduler.fairness.fair_queue import Flow
from jupyter_sing.scheduler.fairness.quotas import UNLIMITED
from jupyter_sing.scheduler.queue.residency import may_leave
from jupyter_sing.scheduler.settings import EngineSettings
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, SessionQuota
from kernelproxy.common.units import bytes_text, duration_text

CANDIDATES_MAX = 64
"""Sessions of a user that are examined for eviction when a memory limit is reached."""

WOKEN = 8
"""Sessions that are retried at once when there is more room within a limit."""

RETRY = 5.0
"""Retry interval for sessions that wait for memory; unpinning and failures send no event."""


Leaving = list[tuple[EngineSession, EngineDevice]]


class Limiter:
    """Compares what sessions use with their limits.

    Parameters
    ----------
    request_tick
        Called with a time at which the engine needs a tick.
    """

    def __init__(self, settings: EngineSettings, request_tick: Callable[[float], None]) -> None:
        self._settings = settings
        self._request_tick = request_tick
        self._alarms: list[tuple[float, int, Flow]] = []

    # Settings.

    def configure(self, settings: EngineSettings) -> None:
        """Use other settings for new users and clusters; `apply` updates a known one."""
        self._settings = settings

    def apply(self, flow: Flow, now: float) -> None:
        """Bring the limits of a user or virtual cluster up to date."""
        assert flow.quota
        if flow.parent is None:
            limits = self._settings.vc_limits.get(flow.name)
        else:
            limits = self._settings.user_limits.get((flow.parent.name, flow.name))
        flow.quota.limits = limits or UNLIMITED
        flow.quota.bounded = flow.quota.limits != UNLIMITED
        flow.quota.returns_at, flow.quota.alarm = -math.inf, math.inf
        flow.quota.relieve()
        self.watch(flow, now)

    # Devices and device time.

    def is_capped(self, flow: Flow, gpus: int, now: float) -> bool:
        """True if a user or virtual cluster may not have this many more devices now."""
        quota = flow.quota
        assert quota
        return quota.bounded and (
            quota.taken + gpus > quota.limits.devices or self.is_exhausted(flow, now)
        )

    def is_exhausted(self, flow: Flow, now: float) -> bool:
        """True if it has used up its device time."""
        quota = flow.quota
        assert quota
        if quota.limits.gpu_seconds_per_day == math.inf:
            return False
        if now < quota.returns_at:
            return True
        if flow.used(now) < quota.limits.gpu_seconds_per_day:
            return False
        flow.settle(now)
        assert flow.day
        quota.returns_at = flow.day.below(quota.limits.gpu_seconds_per_day, now)
        if quota.returns_at < math.inf:
            self._alarm(flow, quota.returns_at)
        return True

    def holds_back(self, session: EngineSession, now: float) -> bool:
        """True if its user or virtual cluster is at a limit of devices or device time."""
        user, cluster = _flows(session)
        return self.is_capped(user, session.gpus, now) or self.is_capped(cluster, session.gpus, now)

    def has_ended(self, session: EngineSession, now: float) -> bool:
        """True if the device time of its user or virtual cluster is used up."""
        return any(q.bounded and self.is_exhausted(q.flow, now) for q in session.quotas)

    def watch(self, flow: Flow, now: float) -> None:
        """Record that a user or virtual cluster holds more devices: its time ends sooner."""
        quota = flow.quota
        assert quota
        limit = quota.limits.gpu_seconds_per_day
        if limit == math.inf or not flow.devices:
            return
        at = now + max(1e-3, (limit - flow.used(now)) / flow.devices)
        if at < quota.alarm and now >= quota.returns_at:
            quota.alarm = at
            self._alarm(flow, at)

    def _alarm(self, flow: Flow, at: float) -> None:
        heapq.heappush(self._alarms, (at, flow.number, flow))
        self._request_tick(at)

    def due(self, now: float) -> list[EngineSession]:
        """Check the flows that are due; return sessions whose device time is used up."""
        ending: dict[EngineSession, None] = {}
        while self._alarms and self._alarms[0][0] <= now:
            _, _, flow = heapq.heappop(self._alarms)
            quota = flow.quota
            assert quota
            if quota.alarm <= now:
                quota.alarm = math.inf
            if self.is_exhausted(flow, now):
                ending.update(quota.holders)
            else:
                quota.relieve()
                self.watch(flow, now)
        return list(ending)

    # Memory.

    def leaving(self, session: EngineSession, now: float) -> Leaving | None:
        """Find what has to leave devices before a session can be loaded; None: it has to wait.

        Only idle sessions of the same user, or virtual cluster, are chosen, least recently used
        first. What is on devices already may stay, even beyond the limit.
        """
        found: dict[tuple[EngineSession, EngineDevice], None] = {}
        for quota in session.quotas:
            if quota.limits.device_memory == math.inf:
                continue
            adding = _counted(session, quota) - quota.residents.get(session, 0)
            excess = quota.memory + quota.coming + adding - quota.limits.device_memory
            if excess <= 0:
                continue
            for other in islice(quota.residents, CANDIDATES_MAX):
                if excess <= 0:
                    break
                if other is session or not (other.residency.moving or may_leave(other, now)):
                    continue
                excess -= quota.residents[other]
                found.update({(other, device): None for device in other.residency.homes})
            if excess > 0 and adding > 0:
                return None
        return list(found)

    def put_aside(self, session: EngineSession, now: float) -> None:
        """Let a session wait for room within the limit of its user or virtual cluster."""
        user, cluster = _flows(session)
        assert user.quota
        flow = user if self._lacks(session, user.quota) else cluster
        assert flow.quota
        session.wait.short = flow.quota
        flow.quota.short[session] = None
        if flow.quota.retry_at <= now:
            flow.quota.retry_at = now + RETRY
            self._alarm(flow, flow.quota.retry_at)

    @staticmethod
    def _lacks(session: EngineSession, quota: SessionQuota) -> bool:
        adding = _counted(session, quota) - quota.residents.get(session, 0)
        return quota.memory + quota.coming + adding > quota.limits.device_memory

    def forget(self, session: EngineSession) -> None:
        """Record that a session no longer waits for room."""
        if session.wait.short is not None:
            session.wait.short.short.pop(session, None)
            session.wait.short = None

    def woken(self, flow: Flow, now: float) -> list[EngineSession]:
        """Remove and return some sessions that waited for room, those retried longest ago first."""
        quota = flow.quota
        assert quota
        chosen = list(islice(quota.short, WOKEN))
        for session in chosen:
            self.forget(session)
        if quota.short:
            quota.relieve()
            self._request_tick(now + 0.05)
        return chosen

    # Texts.

    def reason(self, session: EngineSession, now: float) -> Held | None:
        """Return the limit that a session waits for."""
        for flow in _flows(session):
            quota = flow.quota
            assert quota
            found = _about_devices(session, quota)
            if found is None and self.is_exhausted(flow, now):
                found = _about_time(flow, now)
            if found is None and session.wait.short is not None and self._lacks(session, quota):
                found = _about_memory(session, quota)
            if found is not None:
                return found
        return None


@dataclass(frozen=True, slots=True)
class Held:
    """Limit at which a session waits.

    Attributes
    ----------
    flow
        User or virtual cluster whose limit it is.
    text
        A user-facing clause.
    seconds
        Until it applies no more; `math.inf`: it always applies. None if that is unknown.
    devices
        Limit of devices at the same time.
    """

    flow: Flow
    text: str
    seconds: float | None
    devices: float


def _about_devices(session: EngineSession, quota: SessionQuota) -> Held | None:
    most, seconds = quota.limits.devices, None
    if most <= 0:
        text, seconds = f"The policy does not let {quota.whose} use devices", math.inf
    elif session.gpus > most:
        needs = f"and this session needs {session.gpus}"
        text, seconds = f"{quota.whose} may have {_devices(most)} at once, {needs}", math.inf
    elif quota.taken + session.gpus > most:
        more = f", and this session needs {session.gpus}" if session.gpus > 1 else ""
        until = "until one of them is given back" if quota.taken > 1 else "until it is given back"
        text = f"{quota.whose} has {quota.taken} of {_devices(most)}{more}: waits {until}"
    else:
        return None
    return Held(quota.flow, text, seconds, most)


def _about_time(flow: Flow, now: float) -> Held:
    quota = flow.quota
    assert quota
    limit, seconds = quota.limits.gpu_seconds_per_day, quota.returns_at - now
    if limit <= 0.0:
        text = f"The policy gives {quota.whose} no device time"
    else:
        wait = duration_text(max(1.0, seconds))
        text = (
            f"{quota.whose} has used {flow.used(now) / 3600:.2f} of {limit / 3600:.2f} hours of"
            f" device time in 24 hours: waits {wait} until some of them come back"
        )
    return Held(flow, text, seconds, quota.limits.devices)


def _counted(session: EngineSession, quota: SessionQuota) -> float:
    """Return the bytes of a session that count, at most the limit.

    A session that exceeds the limit by itself, as the limit was lowered, is resumed once all others
    have left, so that its user can free some of its memory.
    """
    return min(session.memory * session.gpus, quota.limits.device_memory)


def _about_memory(session: EngineSession, quota: SessionQuota) -> Held:
    most, size = quota.limits.device_memory, session.memory * session.gpus
    text = (
        f"{quota.whose} has {bytes_text(quota.memory + quota.coming)} of {bytes_text(most)} on"
        f" devices, and this session needs {bytes_text(size)}: waits until some of it is given back"
    )
    return Held(quota.flow, text, None, quota.limits.devices)


def _flows(session: EngineSession) -> tuple[Flow, Flow]:
    user = session.flow.parent
    assert user
    assert user.parent
    return user, user.parent


def _devices(count: float) -> str:
    return f"{count:g} device{'' if count == 1 else 's'}"
