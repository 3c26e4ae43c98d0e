"""Dispatch: serve waiting sessions, in order, while there are devices to grant.

Users and virtual clusters at a limit are left out. They are served afterwards: one of their waiting
sessions may preempt another one.
"""

from __future__ import annotations

from jupyter_sing.scheduler.fairness.fair_queue import Flow, ServiceLedger
from jupyter_sing.scheduler.gangs.growth import Growth
from jupyter_sing.scheduler.gangs.job_text import devices_text
from jupyter_sing.scheduler.queue.gangs import allowed
from jupyter_sing.scheduler.queue.lease_table import LeaseTable
from jupyter_sing.scheduler.queue.packing import Packing
from jupyter_sing.scheduler.queue.placement import Later, Placement, PlacementChoice
from jupyter_sing.scheduler.queue.timers import Timers
from jupyter_sing.scheduler.queue.wait_queue import Blocked
from jupyter_sing.scheduler.state import EngineDevice, EngineSession, Phase

YIELD_PAUSE = 0.05
"""Seconds for which a session that has lost its reservation does not reserve again.

Otherwise it and the session that took the devices would reserve in turns for ever.
"""

SKIPS_MAX = 32
"""Sessions that may be passed over in one round because waiting is better for them."""


class Dispatcher:
    """Dispatcher: finds which session is served next, and on which devices.

    Attributes
    ----------
    guaranteed
        True if there are guarantees.
    yielded
        Sessions that have lost a reservation, or could not use it, since the last round began.
    hopeless
        Sessions that need more devices at once than any session can have.
    """

    def __init__(
        self,
        timers: Timers,
        ledger: ServiceLedger,
        leases: LeaseTable,
        packing: Packing,
        guaranteed: bool,
    ) -> None:
        self._timers = timers
        self._ledger = ledger
        self._leases = leases
        self._waiting, self._running = timers.waiting, timers.running
        self._limiter = timers.limiter
        self._packing = packing
        self.placement = Placement(
            leases.table.nodes, leases.table.free, timers.running, leases.table.refusals
        )
        self._growth = Growth(timers, leases, self.placement)
        self.guaranteed = guaranteed
        self.widest = leases.widest()
        self.yielded: dict[EngineSession, None] = {}
        self.hopeless: dict[EngineSession, None] = {}
        self._compared_after = float("-inf")

    def let_wait(self, session: EngineSession, now: float) -> None:
        """Add a session to those that wait to be served."""
        if session.gpus > self.widest:
            self.hopeless[session] = None
            return
        self._waiting.add(session, self._timers.level(session, now), now)
        self._timers.mark_flows(session)

    def withdraw(self, session: EngineSession) -> None:
        """Record that a session no longer waits."""
        self._waiting.remove(session)
        self._limiter.forget(session)
        self.hopeless.pop(session, None)

    def begin_again(self, guaranteed: bool, now: float) -> None:
        """Queue all waiting sessions again, after a change of the guarantees."""
        self.guaranteed = guaranteed
        self.widest = self._leases.widest()
        hopeless, self.hopeless = self.hopeless, {}
        for session in [*hopeless, *self._waiting.sessions()]:
            self._waiting.remove(session)
            self.let_wait(session, now)

    def serve(self, now: float) -> None:
        """Grant or reserve all devices that can be granted."""
        self._wake(now)
        self._serve(now)
        self._take_turns(now)
        settings = self._timers.settings
        if len(self._waiting) and not len(self._leases.table.free) and settings.packing:
            self._pack(now)
        self._growth.review(now)

    def resume(
        self, session: EngineSession, most: int, given: tuple[EngineDevice, ...], now: float
    ) -> None:
        """Let a gang that was stopped to be resized continue, unless it can only wait.

        It has at most as many devices as was decided, and none of those that it has `given` away.
        """
        most = int(min(most, allowed(session)))
        if session.phase is not Phase.WAITING or not self._is_free_to(session, now):
            return
        devices = self.placement.gangs.idle(session, most, now, given)
        if devices is not None:
            reason = f"its job continues on {devices_text(len(devices))}"
            self._carry_out(session, PlacementChoice(devices, (), reason), now)

    def _is_free_to(self, session: EngineSession, now: float) -> bool:
        """True if no limit holds a gang back."""
        return (
            not session.residency.moving
            and not self._limiter.has_ended(session, now)
            and self._limiter.leaving(session, now) is not None
        )

    def _wake(self, now: float) -> None:
        """Consider sessions again whose user or virtual cluster was at a limit."""
        relieved = list(self._ledger.relieved)
        self._ledger.relieved.clear()
        for flow in relieved:
            self._waiting.wake(flow, now)
            for session in self._limiter.woken(flow, now):
                self.let_wait(session, now)

    def _serve(self, now: float) -> None:
        blocked = Blocked(self._running.has_own, self.guaranteed)
        passed: list[EngineSession] = []
        self.yielded.clear()
        while len(self._waiting) and (len(self._leases.table.free) or len(self._running)):
            session = self._waiting.best(now, blocked)
            if session is None or len(passed) >= SKIPS_MAX:
                break
            if self.placement.gangs.is_paused(session, now):
                blocked.add(session.vc, session.gpus)
                continue
            if not self._is_ready(session, now):
                self._pass_over(session, passed)
                continue
            if self._limiter.leaving(session, now) is None:
                self._put_aside(session, now)
                continue
            if session.gang is not None:
                others = len(self._waiting) > 1
                why = "other sessions wait for devices" if others else "no other device is free"
                session.gang.cause, session.gang.shrunk = why, False
                if not others and self._spread(session, now):
                    continue
            choice = self.placement.choose(session, self._timers.level(session, now), now)
            if isinstance(choice, Later):
                self._timers.request_tick(choice.at)
                self._pass_over(session, passed)
            elif not self._carry_out(session, choice, now):
                if self.placement.cramped:
                    self._pass_over(session, passed)
                    continue
                blocked.add(session.vc, session.gpus)
                if now >= self._compared_after:
                    self._compared_after = now + self._timers.settings.compare_after
                    self._timers.request_tick(self._compared_after)
                again = self.placement.gangs.note_failure(session, now)
                if again is not None:
                    self._timers.request_tick(again)
        for session in passed:
            self._waiting.add(session, self._timers.level(session, now), now)

    def _spread(self, session: EngineSession, now: float) -> bool:
        """Give a gang more devices than its least number; nothing else waits for them."""
        devices = self.placement.gangs.idle(session, allowed(session), now)
        if devices is None or len(devices) <= session.gpus:
            return False
        reason = f"{devices_text(len(devices))} are free for its job"
        return self._carry_out(session, PlacementChoice(devices, (), reason), now)

    def _is_ready(self, session: EngineSession, now: float) -> bool:
        """True if a session could use a lease now, if it had one."""
        if session in self.yielded:
            self._timers.request_tick(now + YIELD_PAUSE)
            return False
        return not session.residency.moving

    def _put_aside(self, session: EngineSession, now: float) -> None:
        """Let a session wait for room within its limits."""
        self._waiting.remove(session)
        self._limiter.put_aside(session, now)

    def _take_turns(self, now: float) -> None:
        """Let sessions of users and virtual clusters at a device limit replace each other."""
        flows = list(self._timers.turns)
        self._timers.turns.clear()
        for flow in flows:
            self._take_turn(flow, now)

    def _take_turn(self, flow: Flow, now: float) -> None:
        quota = flow.quota
        assert quota
        if not quota.taken or self._limiter.is_exhausted(flow, now):
            return
        session = self._waiting.best_within(flow, now)
        if (
            session is None
            or not quota.taken + session.gpus > quota.limits.devices >= session.gpus
            or not self._is_ready(session, now)
            or self._limiter.has_ended(session, now)
        ):
            return
        if self._limiter.leaving(session, now) is None:
            self._put_aside(session, now)
            return
        level = self._timers.level(session, now)
        choice = self.placement.swap(session, level, quota, now)
        if choice is None or not self._carry_out(session, choice, now):
            at = self._timers.next_review(session, now)
            later = now + self._timers.settings.compare_after
            self._timers.set_timer(session, later if at is None else min(at, later))

    def _pack(self, now: float) -> None:
        """Let waiting sessions share devices, where all users concerned permit it."""
        while (pair := self._packing.pair(now)) is not None:
            host, guest = pair
            self.withdraw(guest)
            self._packing.join(host, guest)
            self._leases.pack(host, guest, now)

    def _pass_over(self, session: EngineSession, passed: list[EngineSession]) -> None:
        """Leave a session out of the rest of this round."""
        self._waiting.remove(session)
        passed.append(session)

    def _carry_out(
        self, session: EngineSession, choice: PlacementChoice | None, now: float
    ) -> bool:
        self._waiting.remove(session)
        aged = session.wait.boost > 0
        for victim in choice.victims if choice else ():
            self._running.remove(victim)
        if choice is not None:
            session.size_to(len(choice.devices))
            done = self._leases.reservations.take(
                session, choice.devices, choice.victims, choice.reason, now
            )
        else:
            done = self._leases.entitlements.below(
                session.vc, session.gpus
            ) and self._leases.reservations.entitle(session, now)
        if done:
            if session.gang is not None and session.gpus >= session.gang.most:
                session.gang.cause, session.gang.shrunk = "", False
            session.lease.aged = aged
            self._packing.withdraw(session)
        elif session.phase is Phase.WAITING:
            if session.gang is not None:
                session.size_to(session.gang.sizes(self._leases.table.largest)[0])
            self.let_wait(session, now)
        return done
