"""Interface between the agent and a scheduler, which decides which session uses a device, and when.

A session needs a *lease* to execute: a token, higher than any before it, that the `Arbiter` gives
and takes. The agent requests it when the session has something to execute, and reports when it has
nothing more. Without a scheduler (`UnrestrictedArbiter`) each session always has a lease.

All methods return at once and are called in the agent's loop. Either side may call the other from
within a call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import DecisionView, PolicyEffect, SharingView

#: Tiers of service, the best first.
TIERS = ("premium", "standard", "basic")


@dataclass(frozen=True)
class SessionDescription:
    """Description of a session for the scheduler.

    Parameters
    ----------
    session, name : str
    owner : int
        User id.
    device : str
        Its current or first device.
    memory : int
        Bytes that it uses.
    bound : bool
        Whether its user requested this device by name.
    user : str
        Its user, as policies name them.
    pinned : bool
        Whether its memory must stay on its device.
    tier : str, optional
        Tier that its user requested; None: the best that is allowed.
    """

    session: str
    name: str
    owner: int
    device: str
    memory: int
    bound: bool
    user: str
    pinned: bool = False
    tier: str | None = None


@dataclass(frozen=True)
class Allowance:
    """Limits of a session other than device time; `None`: the agent's own setting applies.

    Parameters
    ----------
    suspend_after, hibernate_after : float, optional
        Seconds without use after which, at the latest, the session is suspended, or hibernates;
        `math.inf`: never.
    disk : float, optional
        Bytes on disk, of states and checkpoints, for all sessions of its user; `math.inf`: no
        limit.
    tier : str, optional
        The tier that it is served at.
    promised : float, optional
        Guaranteed fraction of the device time that it requests within an hour; 0: no guarantee.
    shortfall : str
        Why its guarantee is lower than that of others of its tier, as a sentence; empty if it is
        not.
    device_memory : float, optional
        Bytes of device memory for all sessions of its user; `math.inf`: no limit.
    """

    suspend_after: float | None = None
    hibernate_after: float | None = None
    disk: float | None = None
    tier: str | None = None
    promised: float | None = None
    shortfall: str = ""
    device_memory: float | None = None


@dataclass(frozen=True)
class SessionOutlook:
    """Forecast for a waiting session.

    Parameters
    ----------
    position : int
        Place in the queue; 1: it is next.
    seconds : float or None
        Expected wait for a device; None: unknown.
    reason : str
        User-facing sentence: why it waits, with both of the above.
    """

    position: int
    seconds: float | None
    reason: str


class Actions(Protocol):
    """Actions that the agent carries out for an `Arbiter`; an unknown session or token is ignored.

    Each of the first four is always answered, by one of the calls of `Arbiter` that it names, or by
    `lost` or `closed`. A preemption that overtakes a grant is answered by `refused`.
    """

    def grant(self, session: str, device: str, token: int) -> None:
        """Make a session resident on a device, and let it execute: `started`, or `refused`."""

    def preempt(self, session: str, token: int, within: float = 0.0) -> None:
        """Stop the execution of a session at the next operator: `released`, or `done`.

        If it reaches its memory minimum within `within` seconds, it stops there instead.
        """

    def evict(self, session: str, device: str, reason: str) -> None:
        """Evict a session without a lease from a device: `evicted`, or `stayed`."""

    def migrate(self, session: str, source: str, target: str) -> None:
        """Migrate a session without a lease to another device: `moved`, or `stayed`."""

    def prepare(self, session: str, device: str) -> None:
        """Prepare a session for a migration to a device that is expected soon: not answered."""

    def explain(self, session: str, reason: str) -> None:
        """Set the user-facing sentence that explains why a session waits."""

    def describe(self, session: str, sentence: str) -> None:
        """Set a user-facing sentence about how a session executes; empty: nothing special."""

    def allow(self, session: str, allowance: Allowance) -> None:
        """Set the limits of a session."""


class Arbiter(Protocol):
    """The scheduler, as the agent calls it; see the module."""

    #: True if a session keeps its lease while it has nothing to execute.
    keeps: bool

    def begin(self, actions: Actions, devices: dict[str, int]) -> None:
        """Begin to schedule devices, given as their bytes of memory by id."""

    def opened(self, terms: SessionDescription) -> None:
        """Notify of a new session."""

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        """Notify that a session is a rank of a job, from 0 to `size` - 1; idempotent.

        The ranks of a job are scheduled together. `job` names it among those of its user.
        """

    def changed(self, terms: SessionDescription) -> None:
        """Apply new terms that the session's user requested: `pinned`, `tier`, or a name.

        Raises
        ------
        ControlError
            If they are not allowed; the previous terms stay in force.
        """

    def admits(self, user: str) -> str:
        """Return a sentence why a user may not use any device at present; empty: they may."""

    def closed(self, session: str) -> None:
        """Notify that a session has ended, and its lease with it."""

    def wants(self, session: str) -> None:
        """Notify, once, that a session without a lease has something to execute."""

    def done(self, session: str) -> None:
        """Notify that a session has nothing more to execute and has stopped: its lease is over."""

    def started(self, session: str, token: int) -> None:
        """Notify that a session has begun to execute."""

    def released(self, session: str, token: int) -> None:
        """Notify that a session has stopped executing."""

    def lost(self, session: str, why: str = "") -> None:
        """Notify that a session's worker died: its lease is over, and it needs another one.

        `why` is a sentence, if the cause is known.
        """

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        """Notify that a session belongs to another device now.

        A lease on the previous device is over. If the session had one there, or waited for one, it
        waits for one on the new device. `resident`: whether its memory is there.
        """

    def evicted(self, session: str, device: str) -> None:
        """Notify that a session was evicted from its device."""

    def refused(self, session: str, token: int, why: str) -> None:
        """Notify that a grant failed: the lease is over, and the session needs another one.

        Its memory is where it was before.
        """

    def device_changed(self, device: str, *, failed: bool) -> None:
        """Notify that a device failed, or can be used again.

        Leases on a device that failed are over, and it is granted to no session.
        """

    def stayed(self, session: str, device: str, why: str) -> None:
        """Notify that an eviction or a migration failed: the session is still on its device."""

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        """Report measurements of a session.

        Parameters
        ----------
        session : str
        memory : int
            Bytes that it uses.
        seconds : float
            Execution time since the last report.
        step_seconds : float, optional
            Seconds of execution between repetitions of its log, if it repeats.
        nadir : float, optional
            Position of its memory minimum in a step, as a fraction of the step in [0, 1).
        """

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        """Report that a session was made resident on a device: its bytes, and the duration."""

    def contended(self, session: str) -> bool:
        """True if other sessions wait for resources that a session holds."""

    def outlook(self, session: str) -> SessionOutlook | None:
        """Return the forecast for a waiting session; None: it does not wait, or it is unknown."""

    def sharing(self) -> SharingView:
        """Return the results of the decisions so far, for users and programs."""

    def policy(self) -> str:
        """Return the text of the current policy; empty if there is none."""

    def apply(self, text: str, *, dry: bool) -> PolicyEffect:
        """Apply another policy, without disturbing sessions that execute.

        Parameters
        ----------
        text : str
        dry : bool
            Only report what would change.

        Returns
        -------
        dict
            ``affected``: the users and sessions that it affects and how, each with a sentence
            ``text``; ``notes``: sentences about parts of the policy that have no effect here.

        Raises
        ------
        ControlError
            If it is invalid, or cannot apply here; the previous policy stays in force.
        """

    def decisions(self, session: str, count: int) -> list[DecisionView]:
        """Return the last decisions about a session, for ``why``; called in another thread.

        Parameters
        ----------
        session : str
            As the caller named it.
        count : int
            Maximum number of decisions.

        Raises
        ------
        ControlError
            If there are none.
        """

    async def close(self) -> None:
        """End, and release all resources."""


class UnrestrictedArbiter:
    """Arbiter that lets all sessions execute at any time: the system shares the devices."""

    keeps = True

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._devices: dict[str, str] = {}

    def begin(self, actions: Actions, devices: dict[str, int]) -> None:
        self._actions = actions

    def opened(self, terms: SessionDescription) -> None:
        self._devices[terms.session] = terms.device
        self._grant(terms.session)

    def _grant(self, session: str) -> None:
        self._actions.grant(session, self._devices[session], next(self._tokens))

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        pass

    def changed(self, terms: SessionDescription) -> None:
        pass

    def admits(self, user: str) -> str:
        return ""

    def closed(self, session: str) -> None:
        self._devices.pop(session, None)

    def wants(self, session: str) -> None:
        self._grant(session)

    def done(self, session: str) -> None:
        pass

    def started(self, session: str, token: int) -> None:
        pass

    def released(self, session: str, token: int) -> None:
        pass

    def lost(self, session: str, why: str = "") -> None:
        self._grant(session)

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        self._devices[session] = device

    def evicted(self, session: str, device: str) -> None:
        pass

    def refused(self, session: str, token: int, why: str) -> None:
        pass

    def device_changed(self, device: str, *, failed: bool) -> None:
        pass

    def stayed(self, session: str, device: str, why: str) -> None:
        pass

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        pass

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        pass

    def contended(self, session: str) -> bool:
        return False

    def outlook(self, session: str) -> SessionOutlook | None:
        return None

    def sharing(self) -> SharingView:
        return {}

    def policy(self) -> str:
        return ""

    def apply(self, text: str, *, dry: bool) -> PolicyEffect:
        raise ControlError("This daemon shares devices by no policy.", "unavailable")

    def decisions(self, session: str, count: int) -> list[DecisionView]:
        raise ControlError("This daemon decides nothing about sessions.", "unavailable")

    async def close(self) -> None:
        pass
