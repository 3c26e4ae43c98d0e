"""Agent double whose sessions only have leases: it carries out actions after a while, or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jupyter_sing.controller import controller as live
from jupyter_sing.controller.decision_log import DecisionEntry
from jupyter_sing.scheduler.settings import EngineSettings
from kernelproxy.common.scheduler_api import Allowance, SessionDescription

MB = 10**6


@dataclass
class AgentSession:
    """Actual state of a session."""

    terms: SessionDescription
    device: str
    wants: bool = False
    token: int | None = None
    executes: bool = False
    reason: str = ""
    manner: str = ""


class Journal:
    """Replacement for the log of decisions, and of accounts."""

    def __init__(self) -> None:
        self.entries: list[DecisionEntry] = []
        self.accounts: Any = None

    def note(self, entry: DecisionEntry) -> None:
        assert entry.reason.endswith((".", ".)")), entry
        self.entries.append(entry)

    def keep(self, accounts: Any) -> None:
        self.accounts = accounts

    def close(self) -> None:
        pass


class AgentDouble:
    """An agent; must be made in a running loop, best in a virtual one.

    Attributes
    ----------
    delay
        Seconds that each action takes.
    fails
        Called with an action and a session; returns True if it fails.
    """

    def __init__(
        self,
        monkeypatch: Any,
        count: int = 2,
        settings: EngineSettings | None = None,
        memory: int = 1000 * MB,
    ) -> None:
        self.journal, self.settings, self.delay = Journal(), settings, 0.01
        monkeypatch.setattr(live, "DecisionLog", lambda directory: self.journal)
        monkeypatch.setattr(live, "read_accounts", lambda directory: self.journal.accounts)
        self.devices = {f"cpu:{number}": memory for number in range(count)}
        self.sessions: dict[str, AgentSession] = {}
        self.fails: Callable[[str, str], bool] = lambda action, session: False
        self.failed: set[str] = set()
        self.prepared: list[tuple[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """Start a controller."""
        loop = asyncio.get_running_loop()
        settings = self.settings or replace(live.LIVE, grow_after=30.0)
        self.controller = live.Controller(settings, loop.time)
        self.controller.begin(self, self.devices)

    def restart(self) -> None:
        """Let another controller continue; no session has a worker or a lease."""
        before = self.controller
        before._books.close()
        before._driver.close()
        for each in self.sessions.values():
            each.token, each.executes = None, False
        self.begin()

    # What tests do.

    def open(self, session: str, user: str = "bob", device: str = "cpu:0", **terms: Any) -> None:
        given: dict[str, Any] = {"memory": 10 * MB, "bound": False, **terms}
        described = SessionDescription(session, f"name of {session}", 0, device, user=user, **given)
        self.sessions[session] = AgentSession(described, device)
        self.controller.opened(described)

    def ask(self, session: str) -> None:
        found = self.sessions[session]
        if not found.wants:
            found.wants = True
            self.controller.wants(session)

    def rest(self, session: str) -> None:
        found = self.sessions[session]
        if found.wants:
            found.wants, found.token, found.executes = False, None, False
            self.controller.done(session)

    def close(self, session: str) -> None:
        del self.sessions[session]
        self.controller.closed(session)

    def lose(self, session: str) -> None:
        """Kill its worker."""
        found = self.sessions[session]
        found.wants, found.token, found.executes = True, None, False
        self.controller.lost(session)

    def move(self, session: str, device: str) -> None:
        """Migrate it at its user's request."""
        found = self.sessions[session]
        if found.device == device or (found.token is not None and not found.executes):
            return  # it is there, or on its way
        found.device, found.token, found.executes = device, None, False
        self.controller.moved(session, device, resident=True)

    def pin(self, session: str, pinned: bool = True) -> None:
        found = self.sessions[session]
        found.terms = replace(found.terms, pinned=pinned, device=found.device)
        self.controller.changed(found.terms)

    def fail(self, device: str) -> None:
        """Let a device fail; sessions there give their leases up, and are evicted."""
        self.failed.add(device)
        there = {name: e.token for name, e in self.sessions.items() if e.device == device}
        self.controller.device_changed(device, failed=True)
        for name, token in there.items():
            if token is not None and token == self.sessions[name].token:
                self.preempt(name, token)
            self.evict(name, device, "It has failed")

    def heal(self, device: str) -> None:
        self.failed.discard(device)
        self.controller.device_changed(device, failed=False)

    def executing(self, device: str) -> list[str]:
        return [n for n, each in self.sessions.items() if each.executes and each.device == device]

    def where(self, *sessions: str) -> list[str]:
        """Return where sessions execute; "" for one that does not."""
        found = [self.sessions[each] for each in sessions]
        return [each.device if each.executes else "" for each in found]

    def noted(self, session: str, kind: str) -> list[str]:
        return [e.reason for e in self.journal.entries if (e.session, e.kind) == (session, kind)]

    # Actions.

    def _later(self, act: Callable[[AgentSession], None], session: str) -> None:
        controller = self.controller

        def do() -> None:
            found = self.sessions.get(session)
            if found is not None and self.controller is controller:
                act(found)

        asyncio.get_running_loop().call_later(self.delay, do)

    def grant(self, session: str, device: str, token: int) -> None:
        found = self.sessions.get(session)
        if found is None:
            return
        assert found.token is None or token > found.token
        assert device in self.devices
        found.token, found.wants, found.executes = token, True, False

        def act(each: AgentSession) -> None:
            fails = self.fails("grant", session) or device in self.failed
            if each.token == token and each.device != device and not fails:
                each.device = device
                self.controller.moved(session, device, resident=True)
            if each.token != token:
                self.controller.refused(session, token, "Its turn was over.")
            elif fails:
                each.token = None
                self.controller.refused(session, token, "It fails.")
            else:
                each.executes = True
                self.controller.started(session, token)

        self._later(act, session)

    def preempt(self, session: str, token: int, within: float = 0.0) -> None:
        def act(each: AgentSession) -> None:
            if each.token == token and each.executes:
                each.token, each.executes = None, False
                self.controller.released(session, token)

        found = self.sessions.get(session)
        if found is not None and found.token == token and not found.executes:
            found.token = None  # the grant is refused
        else:
            self._later(act, session)

    def prepare(self, session: str, device: str) -> None:
        self.prepared.append((session, device))

    def evict(self, session: str, device: str, reason: str) -> None:
        def act(each: AgentSession) -> None:
            if each.token is not None or each.device != device or self.fails("evict", session):
                self.controller.stayed(session, device, "It is in use.")
            else:
                self.controller.evicted(session, device)

        if session in self.sessions:
            self._later(act, session)

    def migrate(self, session: str, source: str, target: str) -> None:
        def act(each: AgentSession) -> None:
            if each.token is not None or self.fails("migrate", session):
                self.controller.stayed(session, source, "It is in use.")
            else:
                each.device = target
                self.controller.moved(session, target, resident=True)

        if session in self.sessions:
            self._later(act, session)

    def explain(self, session: str, reason: str) -> None:
        self.sessions[session].reason = reason

    def describe(self, session: str, sentence: str) -> None:
        self.sessions[session].manner = sentence

    def allow(self, session: str, allowance: Allowance) -> None:
        assert session in self.sessions
