"""Controller: sends events to the engine, and has the agent carry out the engine's decisions."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from jupyter_sing.controller import decision_log, policy_file
from jupyter_sing.controller.accounts_writer import AccountsUpdate, AccountsWriter
from jupyter_sing.controller.decision_log import DecisionLog, SavedAccounts, read_accounts
from jupyter_sing.controller.decision_runner import DecisionRunner
from jupyter_sing.controller.effective_policy import HostPolicy
from jupyter_sing.controller.engine_driver import EngineDriver
from jupyter_sing.controller.jobs.gang_leases import GangLeases
from jupyter_sing.controller.jobs.jobs import Jobs
from jupyter_sing.controller.lease_calls import LeaseCalls
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.controller.shortfalls import shortfalls
from jupyter_sing.controller.switch_cost import Bandwidth, Rate
from jupyter_sing.controller.time_to_gpu import TimeToGpu
from jupyter_sing.controller.wait_estimates import WaitEstimates
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Decision, Grant, Guarantees, Pack, Unpack
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.persistence import AccountsError
from jupyter_sing.scheduler.policy import differences
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings
from jupyter_sing.scheduler.statistics import Statistics
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import (
    DecisionView,
    DifferenceView,
    PolicyEffect,
    SharingView,
)
from kernelproxy.common.readable import device_name
from kernelproxy.common.scheduler_api import Actions, SessionDescription, SessionOutlook

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


class Controller(LeaseCalls):
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
        self._waits = TimeToGpu()
        self._books = AccountsWriter(self._journal, self._take, clock)
        self._before: frozenset[str] = frozenset()  # sessions of the previous controller
        self._runner = DecisionRunner(
            self._sessions, self._journal, lambda session: self._outlooks.of(session),
            lambda known: self._allow(known, logged=True),
            lambda name: self._jobs.leader_of(name),
        )  # fmt: skip
        self._gangs = GangLeases(
            self._sessions, self._runner, self._waits, lambda event: self._driver.send(event), clock
        )
        self._jobs = Jobs(
            self._sessions, self._gangs, self._runner, self._waits,
            lambda event: self._driver.send(event), self._add, clock,
        )  # fmt: skip
        self._outlooks = WaitEstimates(
            lambda now: self._engine.outlooks(now), self._runner.named, clock
        )

    def begin(self, actions: Actions, devices: dict[str, int]) -> None:
        """See `Arbiter`."""
        self._actions = self._runner.actions = actions
        found = [
            DeviceSpec(name, memory, bytes_per_second=COPY_RATE, constant_seconds=SWITCH_SECONDS)
            for name, memory in devices.items()
        ]
        self._bandwidths = {each: Bandwidth(Rate(COPY_RATE, SWITCH_SECONDS)) for each in devices}
        self._nodes = {socket.gethostname(): list(devices)}
        self._rules = policy_file.begin(self._directory, self._nodes)
        guarantees = None if self._rules.guaranteed is None else self._rules.guarantees()
        before = read_accounts(self._directory)
        self._before = frozenset(before.sessions if before is not None else ())
        self._engine = _first_engine(found, self._settings(), guarantees, before, self._clock())
        self._gangs.engine, self._jobs.device_count = self._engine, len(devices)
        self._driver = EngineDriver(
            self._engine, self._clock, self._carry_out, self._books.note_change
        )

    # ---------------------------------------------------------------- calls of the agent

    def opened(self, terms: SessionDescription) -> None:
        """See `Arbiter`."""
        if terms.session in self._before:
            self._driver.gather()
        standing = self._rules.standing(terms.user, terms.tier)
        known = SessionEntry(terms, standing, terms.memory, device=terms.device)
        self._sessions[terms.session] = known
        if terms.user not in self._users:
            self._users[terms.user] = None
            if self._rules.text:  # else all users have the same settings
                self._driver.send(events.Reconfigured(self._clock(), self._settings()))
        self._add(known)
        if terms.session in self._before:
            self._runner.note(
                terms.session, "restart", "The controller was restarted. The session continues."
            )
        self._allow(known, logged=bool(self._rules.text))
        self._jobs.opened(terms.session)

    def _add(self, known: SessionEntry) -> None:
        """Add a session to the engine.

        An agent starts without workers, even for recovered sessions: a new one is not resident.
        """
        terms, standing = known.terms, known.standing
        self._driver.send(
            events.SessionAdded(
                self._clock(), terms.session, standing.vc, terms.user, standing.tier,
                memory=known.memory, pinned=terms.pinned, may_pack=standing.may_pack,
                device=known.device, bound=terms.device if terms.bound else None,
                resident=known.resident,
            )
        )  # fmt: skip

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        """See `Arbiter`."""
        self._jobs.joined(session, job, rank, size)

    def changed(self, terms: SessionDescription) -> None:
        """See `Arbiter`."""
        known = self._sessions.get(terms.session)
        if known is None:
            return
        standing = self._rules.standing(terms.user, terms.tier)
        if terms.tier is not None and terms.tier != standing.tier:
            raise ControlError(
                f"{terms.user} may have tier {standing.tier} at most. An admin can change that: "
                "jupyter sing policy apply.",
                "not-allowed",
            )
        before, known.terms = known.terms, terms
        self._revise(known, anyway=before.pinned != terms.pinned)
        self._jobs.review(terms.session)

    def _revise(self, known: SessionEntry, *, anyway: bool = False) -> None:
        """Re-apply the current policy to a session; `anyway`: even if its terms are the same."""
        standing, before = self._rules.standing(known.terms.user, known.terms.tier), known.standing
        known.standing = standing
        terms, known.sent = known.terms, False
        name = self._jobs.known_as(terms.session)
        if name is not None and (anyway or standing != before):
            vc = standing.vc if standing.vc != before.vc else None
            self._driver.send(
                events.TermsChanged(
                    self._clock(), name, standing.tier, 1.0, terms.pinned,
                    standing.may_pack, vc, device=terms.device,
                )
            )  # fmt: skip
        self._allow(known, logged=anyway or standing != before)

    def _allow(self, known: SessionEntry, *, logged: bool) -> None:
        """Send the present limits of a session to the agent; with `logged`, also log them."""
        terms, standing = known.terms, known.standing
        allowance = self._rules.allowance(terms.user, standing.tier)
        part = self._settings().targets.get(standing.tier, 0.0)
        shortfall = ""
        if known.shortfall:
            share = f"the {part:.0%} of the device time that {standing.tier} promises"
            shortfall = f"It does not have {share}: {known.shortfall}."
        promised = 0.0 if shortfall else part
        allowance = replace(allowance, promised=promised, shortfall=shortfall)
        self._actions.allow(terms.session, allowance)
        known.sent = True
        if logged:
            stays = f"; its memory stays on {device_name(terms.device)}" if terms.pinned else ""
            why = f"It is served as {standing}, for {terms.user}{stays}. {shortfall}".rstrip()
            self._runner.note(terms.session, "terms", why)

    def _settings(self) -> EngineSettings:
        """Return the settings of the engine, for all users that it knows."""
        return self._rules.settings(self._base, self._users)

    def admits(self, user: str) -> str:
        """See `Arbiter`."""
        return self._rules.denied(user)

    def closed(self, session: str) -> None:
        """See `Arbiter`."""
        self._waits.forget(session)
        if not self._jobs.closed(session):
            self._driver.send(events.SessionRemoved(self._clock(), session))
        self._sessions.pop(session, None)

    def device_changed(self, device: str, *, failed: bool) -> None:
        """See `Arbiter`."""
        event = events.DeviceFailed if failed else events.DeviceHealed
        self._driver.send(event(self._clock(), device))

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        """See `Arbiter`."""
        if rate := self._bandwidths[device].measured(nbytes, seconds):
            now, cost = self._clock(), (rate.bytes_per_second, rate.constant_seconds)
            log.info("Switches to %s: 1 s per %.3g bytes, and %.3f s", device, *cost)
            self._driver.send(events.BandwidthMeasured(now, device, *cost))

    def contended(self, session: str) -> bool:
        """See `Arbiter`."""
        job = self._jobs.of(session)
        return self._engine.contended(session if job is None else job.id)

    def outlook(self, session: str) -> SessionOutlook | None:
        """See `Arbiter`."""
        job = self._jobs.of(session)
        return self._outlooks.of(session if job is None else job.id)

    def sharing(self) -> SharingView:
        """See `Arbiter`.

        Returns
        -------
        dict
            ``time_to_gpu``: `TimeToGpu.figures`; counts of ``preemptions``, ``switches``,
            ``evictions``, ``migrations`` and ``tier_violations``; ``served``: device seconds of
            each user, by virtual cluster.
        """
        return _sharing(self._engine.statistics(), self._waits)

    def held(self) -> dict[str, tuple[str, int]]:
        """Return the device and the token of every lease, by session."""
        held = self._engine.held()
        alone = {name: lease for name, lease in held.items() if not self._jobs.by_id(name)}
        return alone | self._jobs.held()

    def policy(self) -> str:
        """See `Arbiter`."""
        return self._rules.text

    def apply(self, text: str, *, dry: bool) -> PolicyEffect:
        """See `Arbiter`."""
        rules = HostPolicy(text, self._nodes)
        views = [
            known.view(self._jobs.devices_of(name, held=known.holds))
            for name, known in self._sessions.items()
        ]
        found = differences(self._rules.policy, rules.policy, views)
        if not dry:
            policy_file.keep(self._directory, text)
            guarantees = None if rules.guaranteed == self._rules.guaranteed else rules.guarantees()
            self._rules = rules
            self._driver.send(events.Reconfigured(self._clock(), self._settings(), guarantees))
            for known in list(self._sessions.values()):
                self._revise(known)
        settings, devices = rules.settings(self._base, self._users), len(self._engine.devices())
        sessions = [known.terms for known in self._sessions.values()]
        affected = [cast("DifferenceView", {**asdict(each), "text": str(each)}) for each in found]
        notes = rules.notes() + shortfalls(rules, sessions, settings, devices)
        return {"affected": affected, "notes": notes}

    def decisions(self, session: str, count: int) -> list[DecisionView]:
        """See `Arbiter`."""
        found = decision_log.read(self._directory, session, count)
        return [cast("DecisionView", asdict(each)) for each in found]

    async def close(self) -> None:
        """See `Arbiter`."""
        self._driver.close()
        self._books.close()
        await asyncio.to_thread(self._journal.close)

    # ---------------------------------------------------------------- decisions of the engine

    def _carry_out(self, decisions: list[Decision]) -> None:
        self._outlooks.forget()
        for decision in decisions:
            job = None
            if not isinstance(decision, Pack | Unpack):
                job = self._jobs.by_id(decision.session)
            if job is None:
                self._runner.carry_out(decision)
                if isinstance(decision, Grant):
                    self._jobs.granted(decision.session, decision.token)
            else:
                self._gangs.carry_out(job, decision)

    def _take(self, now: float) -> AccountsUpdate:
        """Return what to save, and send all waiting sessions their current outlook."""
        for session in self._outlooks.waiting():
            if job := self._jobs.by_id(session):
                self._gangs.explain(job)
            elif outlook := self._outlooks.of(session):
                self._actions.explain(session, outlook.reason)
        is_changing = any(known.holds for known in self._sessions.values())
        return AccountsUpdate(list(self._sessions), self._engine.accounts(now), is_changing)


def _sharing(counted: Statistics, waits: TimeToGpu) -> SharingView:
    """Return the engine's counters and the waits, as `Controller.sharing` describes them."""
    served: dict[str, dict[str, float]] = {}
    for (vc, user), seconds in counted.served.items():
        served.setdefault(vc, {})[user] = seconds
    return {
        "time_to_gpu": waits.figures(),
        "preemptions": counted.preemptions,
        "switches": counted.switches,
        "evictions": counted.evictions,
        "migrations": counted.migrations,
        "tier_violations": counted.tier_violations,
        "served": served,
    }


def _first_engine(
    devices: list[DeviceSpec],
    settings: EngineSettings,
    guarantees: Guarantees | None,
    before: SavedAccounts | None,
    now: float,
) -> Engine:
    """Create the engine, with the accounts of the previous controller if they can be read."""
    if before is not None:
        at = now - max(0.0, time.time() - before.at)
        try:
            return Engine(devices, settings, guarantees, before.accounts, at)
        except AccountsError as error:
            log.warning("What everybody has had is forgotten: %s", error)
    return Engine(devices, settings, guarantees)
