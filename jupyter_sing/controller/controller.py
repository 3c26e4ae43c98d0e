"""Controller: sends events to the engine, and has the agent carry out the engine's decisions."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from jupyter_sing.controller import decision_log, policy_file
from jupyter_sing.controller.accounts_writer import AccountsUpdate, AccountsWriter
from jupyter_sing.controller.decision_log import DecisionEntry, DecisionLog, read_accounts
from jupyter_sing.controller.effective_policy import EffectiveTerms, HostPolicy
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.controller.switch_cost import Bandwidth, Rate
from jupyter_sing.controller.time_to_gpu import TimeToGpu
from jupyter_sing.controller.wait_estimates import WaitEstimates
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import (
    Decision,
    Evict,
    Grant,
    MigrateMemory,
    Pack,
    Preempt,
    Promised,
    Queued,
    Unpack,
)
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.fairness.tier_targets import admit
from jupyter_sing.scheduler.persistence import AccountsError
from jupyter_sing.scheduler.policy import differences
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import (
    DecisionView,
    DifferenceView,
    PolicyEffect,
    SharingView,
)
from kernelproxy.common.readable import device_name, devices_named
from kernelproxy.common.scheduler_api import Hands, SessionDescription, SessionOutlook

log = logging.getLogger(__name__)

#: Cost of a switch until it was measured: bytes per second, and seconds.
COPY_RATE, SWITCH_SECONDS = 2e9, 0.05

#: Sessions that fit onto a device together are switched in milliseconds, so quanta are short.
LIVE = EngineSettings(
    quanta=(0.5, 1.0, 4.0, 4.0),
    compare_after=0.5,
    run_min=0.5,
    turn_switches=4.0,
    move_lag=10.0,
    swap_share=0.2,
)

#: Rounds of the event loop in which all sessions that an agent has recovered request devices.
GATHER_ROUNDS = 100

_ID = re.compile(r"\b[0-9a-f]{12}\b")


class Controller:
    """An `kernelproxy.common.scheduler_api.Arbiter` that uses the engine.

    Parameters
    ----------
    settings : EngineSettings, optional
        Of the engine.
    clock : callable, optional
        Seconds; the monotonic clock by default.
    directory : Path, optional
        Where decisions and the policy are saved; by default the runtime directory.
    """

    keeps = False

    def __init__(
        self,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        directory: Path | None = None,
    ) -> None:
        self._base, self._clock = settings or LIVE, clock
        self._directory = directory or paths.runtime_dir()
        self._journal = DecisionLog(self._directory)
        self._sessions: dict[str, SessionEntry] = {}
        self._users: dict[str, None] = {}
        self._told: deque[events.Event] = deque()
        self._waits = TimeToGpu()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._books = AccountsWriter(self._journal, self._take, clock)
        self._before: frozenset[str] = frozenset()  # sessions of the previous controller
        self._gathering = False
        self._outlooks = WaitEstimates(lambda now: self._engine.outlooks(now), self._named, clock)

    def begin(self, hands: Hands, devices: dict[str, int]) -> None:
        """See `Arbiter`."""
        self._hands = hands
        found = [
            DeviceSpec(name, memory, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS)
            for name, memory in devices.items()
        ]
        self._bandwidths = {each: Bandwidth(Rate(COPY_RATE, SWITCH_SECONDS)) for each in devices}
        self._nodes = {socket.gethostname(): list(devices)}
        self._rules = policy_file.begin(self._directory, self._nodes)
        guarantees = None if self._rules.promised is None else self._rules.guarantees()
        before = read_accounts(self._directory)
        if before is not None:
            self._before = frozenset(before.sessions)
            at = self._clock() - max(0.0, time.time() - before.at)
            try:
                self._engine = Engine(found, self._settings(), guarantees, before.accounts, at)
                return
            except AccountsError as error:
                log.warning("What everybody has had is forgotten: %s", error)
        self._engine = Engine(found, self._settings(), guarantees)

    # ---------------------------------------------------------------- calls of the agent

    def opened(self, terms: SessionDescription) -> None:
        """See `Arbiter`."""
        if terms.session in self._before and not self._gathering:
            self._gathering = True
            self._gather()
        known = SessionEntry(terms, self._standing(terms), terms.memory)
        self._sessions[terms.session] = known
        if terms.user not in self._users:
            self._users[terms.user] = None
            if self._rules.text:  # else all users have the same settings
                self._tell(events.Reconfigured(self._clock(), self._settings()))
        standing = known.standing
        self._tell(
            events.SessionAdded(
                self._clock(), terms.session, standing.vc, terms.user, standing.tier,
                memory=terms.memory, pinned=terms.pinned, may_pack=standing.may_pack,
                device=terms.device, bound=terms.device if terms.bound else None,
                resident=False,  # an agent starts without workers, even for recovered sessions
            )
        )  # fmt: skip
        if terms.session in self._before:
            self._note(
                terms.session, "restart", "The controller was restarted. The session continues."
            )
        self._allow(known, said=bool(self._rules.text))

    def changed(self, terms: SessionDescription) -> None:
        """See `Arbiter`."""
        known = self._sessions.get(terms.session)
        if known is None:
            return
        standing = self._standing(terms)
        if terms.tier is not None and terms.tier != standing.tier:
            raise ControlError(
                f"{terms.user} may have tier {standing.tier} at most. An admin can change that: "
                "jupyter sing policy apply.",
                "not-allowed",
            )
        before, known.terms = known.terms, terms
        self._revise(known, anyway=before.pinned != terms.pinned)

    def _standing(self, terms: SessionDescription) -> EffectiveTerms:
        """Return the effective terms of a session: the policy's, and its user's own choice."""
        return self._rules.standing(terms.user, terms.tier)

    def _revise(self, known: SessionEntry, *, anyway: bool = False) -> None:
        """Re-apply the current policy to a session; `anyway`: even if its terms are the same."""
        standing, before = self._standing(known.terms), known.standing
        known.standing = standing
        terms, known.said = known.terms, False
        if anyway or standing != before:
            vc = standing.vc if standing.vc != before.vc else None
            self._tell(
                events.TermsChanged(
                    self._clock(), terms.session, standing.tier, 1.0, terms.pinned,
                    standing.may_pack, vc, device=terms.device,
                )
            )  # fmt: skip
        self._allow(known, said=anyway or standing != before)

    def _allow(self, known: SessionEntry, *, said: bool) -> None:
        """Send the present limits of a session to the agent; with `said`, also log them."""
        terms, standing = known.terms, known.standing
        allowance = self._rules.allowance(terms.user, standing.tier)
        part = self._settings().targets.get(standing.tier, 0.0)
        shortfall = ""
        if known.shortfall:
            share = f"the {part:.0%} of the device time that {standing.tier} promises"
            shortfall = f"It does not have {share}: {known.shortfall}."
        promised = 0.0 if shortfall else part
        allowance = replace(allowance, promised=promised, shortfall=shortfall)
        self._hands.allow(terms.session, allowance)
        known.said = True
        if said:
            stays = f"; its memory stays on {device_name(terms.device)}" if terms.pinned else ""
            why = f"It is served as {standing}, for {terms.user}{stays}. {shortfall}".rstrip()
            self._note(terms.session, "terms", why)

    def _settings(self) -> EngineSettings:
        """Return the settings of the engine, for all users that it knows."""
        return self._rules.settings(self._base, self._users)

    def admits(self, user: str) -> str:
        """See `Arbiter`."""
        return self._rules.denied(user)

    def closed(self, session: str) -> None:
        """See `Arbiter`."""
        self._waits.forget(session)
        self._tell(events.SessionRemoved(self._clock(), session))
        self._sessions.pop(session, None)

    def wants(self, session: str) -> None:
        """See `Arbiter`."""
        self._waits.begin(session, self._clock())
        self._tell(events.CellSubmitted(self._clock(), session))

    def done(self, session: str) -> None:
        """See `Arbiter`."""
        self._waits.forget(session)
        self._note_end(session)
        self._tell(events.CellFinished(self._clock(), session))

    def started(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        if known := self._sessions.get(session):
            self._waits.end(session, known.standing.tier, self._clock())
        self._tell(events.Started(self._clock(), session, token))

    def released(self, session: str, token: int) -> None:
        """See `Arbiter`."""
        self._note_end(session)
        self._tell(events.Released(self._clock(), session, token))

    def lost(self, session: str, why: str = "") -> None:
        """See `Arbiter`."""
        self._note_end(session, resident=False)
        if why:
            self._note(session, "lost", why)
        # It may have been idle; it then needs a lease so that its state can be restored.
        self._tell(events.WorkerDied(self._clock(), session))
        self._tell(events.CellSubmitted(self._clock(), session))

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        """See `Arbiter`."""
        self._tell(events.Moved(self._clock(), session, device, resident))

    def evicted(self, session: str, device: str) -> None:
        """See `Arbiter`."""
        self._note_end(session, resident=False)
        self._tell(events.Evicted(self._clock(), session, device))

    def refused(self, session: str, token: int, why: str) -> None:
        """See `Arbiter`."""
        log.warning("Session %s could not use its turn: %s", session, why)
        self._note_end(session)
        self._tell(events.GrantRefused(self._clock(), session, token, why))

    def stayed(self, session: str, device: str, why: str) -> None:
        """See `Arbiter`."""
        log.warning("Session %s could not leave %s: %s", session, device, why)
        self._tell(events.Stayed(self._clock(), session, device, why))

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        """See `Arbiter`."""
        now = self._clock()
        if known := self._sessions.get(session):
            known.memory = memory
        self._tell(events.Measured(now, session, memory, seconds, step_seconds, nadir))

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        """See `Arbiter`."""
        if rate := self._bandwidths[device].measured(nbytes, seconds):
            now, per_second = self._clock(), rate.bytes_per_second
            log.info("Switches to %s take %.3f s and 1 s per %.3g bytes", device,
                     rate.constant_seconds, per_second)  # fmt: skip
            self._tell(events.BandwidthMeasured(now, device, per_second, rate.constant_seconds))

    def contended(self, session: str) -> bool:
        """See `Arbiter`."""
        return self._engine.contended(session)

    def outlook(self, session: str) -> SessionOutlook | None:
        """See `Arbiter`."""
        return self._outlooks.of(session)

    def sharing(self) -> SharingView:
        """See `Arbiter`.

        Returns
        -------
        dict
            ``time_to_gpu``: `TimeToGpu.figures`; counts of ``preemptions``, ``switches``,
            ``evictions``, ``migrations`` and ``tier_violations``; ``served``: device seconds of
            each user, by virtual cluster.
        """
        counted = self._engine.statistics()
        served: dict[str, dict[str, float]] = {}
        for (vc, user), seconds in counted.served.items():
            served.setdefault(vc, {})[user] = seconds
        return {
            "time_to_gpu": self._waits.figures(),
            "preemptions": counted.preemptions,
            "switches": counted.switches,
            "evictions": counted.evictions,
            "migrations": counted.migrations,
            "tier_violations": counted.tier_violations,
            "served": served,
        }

    def held(self) -> dict[str, tuple[str, int]]:
        """Return the device and the token of every lease, by session."""
        return self._engine.held()

    def policy(self) -> str:
        """See `Arbiter`."""
        return self._rules.text

    def apply(self, text: str, *, dry: bool) -> PolicyEffect:
        """See `Arbiter`."""
        rules = HostPolicy(text, self._nodes)
        views = [known.view() for known in self._sessions.values()]
        found = differences(self._rules.policy, rules.policy, views)
        if not dry:
            policy_file.keep(self._directory, text)
            same = rules.promised == self._rules.promised
            guarantees = None if same else rules.guarantees()
            self._rules = rules
            self._tell(events.Reconfigured(self._clock(), self._settings(), guarantees))
            for known in list(self._sessions.values()):
                self._revise(known)
        affected = [cast("DifferenceView", {**asdict(each), "text": str(each)}) for each in found]
        return {"affected": affected, "notes": [*rules.notes(), *self._shortfalls(rules)]}

    def _shortfalls(self, rules: HostPolicy) -> list[str]:
        """Return for which sessions a policy has tier targets that cannot be kept here."""
        devices = len(self._engine.devices())
        settings = rules.settings(self._base, self._users)
        asking = [
            (known.terms, rules.standing(known.terms.user, known.terms.tier).tier)
            for known in self._sessions.values()
        ]
        notes, demand = [], dict.fromkeys(Tier, 0.0)
        for terms, tier in asking:
            found = admit(tier, 1, demand, devices, devices, settings.targets)
            if found.kept:
                demand[tier] += settings.duty
                continue
            share = f"the {settings.targets[tier]:.0%} of the device time that {tier} promises"
            why = found.reason.partition(": ")[2]
            notes.append(f"{terms.name} of {terms.user} does not have {share}: {why}.")
        return notes

    def decisions(self, session: str, count: int) -> list[DecisionView]:
        """See `Arbiter`."""
        found = decision_log.read(self._directory, session, count)
        return [cast("DecisionView", asdict(each)) for each in found]

    async def close(self) -> None:
        """See `Arbiter`."""
        if self._timer is not None:
            self._timer.cancel()
        self._books.close()
        await asyncio.to_thread(self._journal.close)

    # ---------------------------------------------------------------- decisions of the engine

    def _gather(self, rounds: int = GATHER_ROUNDS) -> None:
        """Send no event to the engine until all recovered sessions have requested devices again.

        They do so within a few rounds of the event loop. Otherwise the first one would be served,
        instead of the one that is owed the most. They are sorted by the service that they have had,
        see `Engine.tags`.
        """
        if rounds:
            asyncio.get_running_loop().call_soon(self._gather, rounds - 1)
            return
        last = {getattr(each, "session", ""): each for each in self._told}
        asking = [e for e in last.values() if isinstance(e, events.CellSubmitted)]
        gathered = [each for each in self._told if each not in asking]
        self._gathering, now = False, self._clock()
        self._told.clear()
        self._handle(*gathered)
        asking.sort(key=lambda each: self._engine.tags(each.session, now))
        if asking:
            self._handle(*(replace(each, at=now) for each in asking))

    def _tell(self, event: events.Event) -> None:
        """Queue an event for the engine; handle it now unless another one is being handled."""
        self._told.append(event)
        if not self._busy and not self._gathering:
            self._handle(self._told.popleft())

    def _handle(self, *told: events.Event) -> None:
        """Let the engine decide and carry that out; repeat for events queued meanwhile."""
        self._busy = True
        try:
            while told:
                decisions = self._engine.handle(*told)
                self._outlooks.forget()
                for decision in decisions:
                    self._carry_out(decision)
                told = (self._told.popleft(),) if self._told else ()
        finally:
            self._busy = False
        self._set_timer()
        self._books.note_change()

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Pack | Unpack):
            self._note_company(decision)
            return
        if isinstance(decision, Promised):
            self._note_promise(decision)
            return
        why = self._named(decision.reason, decision.session)
        match decision:
            case Grant(session, devices, token, quantum):
                if known := self._sessions.get(session):
                    known.holds = known.resident = True
                why = f"It may use {device_name(devices[0])} for {quantum:g} s: {why}."
                self._hands.grant(session, devices[0], token)
            case Preempt(session, token, _, within):
                why = f"Its turn ends: {why}."
                self._hands.preempt(session, token, within)
            case Evict(session, device, to):
                self._hands.evict(session, device, f"{why[:1].upper()}{why[1:]}")
                where = "host memory" if to == "host" else to
                why = f"Its memory goes from {device_name(device)} to {where}: {why}."
            case MigrateMemory(session, source, target):
                why = f"It moves from {device_name(source)} to {device_name(target)}: {why}."
                self._hands.migrate(session, source, target)
            case Queued(session):
                outlook = self._outlooks.of(session)
                if outlook is None:
                    return  # it no longer waits
                why = outlook.reason
                self._hands.explain(session, why)
        self._note(session, decision.kind, why)

    def _note(self, session: str, kind: str, why: str) -> None:
        """Log a decision about a session."""
        self._journal.note(DecisionEntry(time.time(), session, self._name(session), kind, why))

    def _note_end(self, session: str, *, resident: bool = True) -> None:
        """Record that a session no longer holds a device."""
        if known := self._sessions.get(session):
            known.holds, known.resident = False, known.resident and resident

    def _name(self, session: str) -> str:
        known = self._sessions.get(session)
        return session if known is None else known.terms.name

    def _note_company(self, decision: Pack | Unpack) -> None:
        """Log that sessions share a device, or no longer do: once for each of them."""
        kind = decision.kind
        for session in decision.sessions:
            why = self._named(decision.reason, session)
            others = [self._named(each, session) for each in decision.sessions if each != session]
            beside = f"{device_name(decision.device)} with {' and '.join(others)}"
            does = "It shares" if isinstance(decision, Pack) else "It no longer shares"
            self._note(session, kind, f"{does} {beside}: {why}.")

    def _note_promise(self, decision: Promised) -> None:
        """Tell a session whether the target of its tier is kept."""
        if known := self._sessions.get(decision.session):
            known.shortfall = "" if decision.kept else decision.reason.partition(": ")[2]
            if known.said:  # else it is about to be
                self._allow(known, said=True)

    def _named(self, reason: str, session: str) -> str:
        """Replace ids by names, and remove a full stop at the end.

        Of another user's session, the reader sees only the name of that user.
        """
        reader = self._sessions.get(session)

        def name(found: re.Match[str]) -> str:
            other = self._sessions.get(found[0])
            if other is None or reader is None or other.terms.user == reader.terms.user:
                return self._name(found[0])
            return other.terms.user

        return devices_named(_ID.sub(name, reason)).rstrip(". ")

    def _take(self, now: float) -> AccountsUpdate:
        """Return what to save, and send all waiting sessions their current outlook."""
        for session in self._outlooks.waiting():
            if outlook := self._outlooks.of(session):
                self._hands.explain(session, outlook.reason)
        goes_on = any(known.holds for known in self._sessions.values())
        return AccountsUpdate(list(self._sessions), self._engine.accounts(now), goes_on)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._engine.next_tick()
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - self._clock()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._tell(events.Tick(self._clock()))
