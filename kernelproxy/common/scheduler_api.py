"""Who may use a device, and when: what the agent asks a scheduler, and what it does for one.

A session executes with a *lease* only: a token, higher than any before it, that the arbiter gives
and takes. It asks when there is something to execute, and says when there is nothing any more.
Without an arbiter (`Everybody`) each session has a lease for as long as it lives.

All methods return at once and are called in the agent's loop. Either side may call the other from
within a call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

from kernelproxy.common.errors import ControlError

#: What a session may be served as, the best first.
TIERS = ("premium", "standard", "basic")


@dataclass(frozen=True)
class Terms:
    """What a session is, for who decides about it.

    Parameters
    ----------
    session, name : str
    owner : int
        User id.
    device : str
        Where it is or begins.
    memory : int
        Bytes that it has in use.
    bound : bool
        Whether somebody asked for this device by name.
    user : str
        Who it is for, as policies call them.
    pinned : bool
        Whether it is to keep its memory on its device.
    tier : str, optional
        What its user has asked to be served as; None: as well as they may be.
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
    """What a session may have besides turns; `None` where the agent's own settings hold.

    Parameters
    ----------
    suspend_after, hibernate_after : float, optional
        Seconds without use after which it leaves its device, or its process goes to disk, at the
        latest; `math.inf`: never.
    disk : float, optional
        Bytes of states and checkpoints that all sessions of its user may have; `math.inf`: any.
    tier : str, optional
        What it is served as.
    promised : float, optional
        Part of the device time that it asks for within an hour that it gets at least; 0: none.
    shortfall : str
        Why it is promised less than others of its tier, as a sentence; empty if it is not.
    device_memory : float, optional
        Bytes that all sessions of its user may have on devices; `math.inf`: any.
    """

    suspend_after: float | None = None
    hibernate_after: float | None = None
    disk: float | None = None
    tier: str | None = None
    promised: float | None = None
    shortfall: str = ""
    device_memory: float | None = None


@dataclass(frozen=True)
class Outlook:
    """What a session can expect that waits.

    Parameters
    ----------
    position : int
        1: it is next.
    seconds : float or None
        Until it is expected to get a device; None: nobody can say.
    reason : str
        Why it waits, with both, in a sentence for people.
    """

    position: int
    seconds: float | None
    reason: str


class Hands(Protocol):
    """What an arbiter has done. A session or token that is gone by now is no error.

    Each of the first four is always answered, by one of the calls of `Arbiter` that it names, or by
    `lost` or `closed`. A preemption that overtakes a grant is answered by `refused`.
    """

    def grant(self, session: str, device: str, token: int) -> None:
        """Bring a session onto a device, if it is not there, and let it execute: `started`, or
        `refused`.
        """

    def preempt(self, session: str, token: int, within: float = 0.0) -> None:
        """Let a session execute no more, from the next operator on: `released`, or `done`.

        If its memory is least within so many seconds, it stops there instead.
        """

    def evict(self, session: str, device: str, reason: str) -> None:
        """Take a session without a lease off a device: `evicted`, or `stayed`."""

    def migrate(self, session: str, source: str, target: str) -> None:
        """Move a session without a lease from one device to another: `moved`, or `stayed`."""

    def explain(self, session: str, reason: str) -> None:
        """Say why a session waits, in a sentence for people."""

    def allow(self, session: str, allowance: Allowance) -> None:
        """Let other limits hold for a session from now on."""


class Arbiter(Protocol):
    """Decides; see the module."""

    #: Whether leases are kept while there is nothing to do.
    keeps: bool

    def begin(self, hands: Hands, devices: dict[str, int]) -> None:
        """Begin to decide about devices, by id, with so many bytes each."""

    def opened(self, terms: Terms) -> None:
        """There is a session."""

    def changed(self, terms: Terms) -> None:
        """Its user wants other terms: `pinned`, `tier`, or a name.

        Raises
        ------
        ControlError
            If they may not have them; what held before still does.
        """

    def admits(self, user: str) -> str:
        """Say why a user may use no device as things are, in a sentence; empty: they may."""

    def closed(self, session: str) -> None:
        """It is gone, and its lease."""

    def wants(self, session: str) -> None:
        """It has something to execute, and no lease; said once."""

    def done(self, session: str) -> None:
        """It has nothing to execute any more, and executes nothing: its lease is over."""

    def started(self, session: str, token: int) -> None:
        """It may execute from now on."""

    def released(self, session: str, token: int) -> None:
        """It executes nothing any more."""

    def lost(self, session: str, why: str = "") -> None:
        """Its worker died, and its lease is over; it wants another one. `why`: a sentence, if that
        was decided here.
        """

    def moved(self, session: str, device: str, *, resident: bool) -> None:
        """It belongs to a device from now on: a lease of another one is over, and it wants one
        here if it had, or waited for, one there. `resident`: whether its memory is there.
        """

    def evicted(self, session: str, device: str) -> None:
        """It is off its device."""

    def refused(self, session: str, token: int, why: str) -> None:
        """Nothing came of a lease, which is over. It wants another one, and its memory is where it
        was before.
        """

    def stayed(self, session: str, device: str, why: str) -> None:
        """It was to leave a device, for another one or none, and is there still."""

    def measured(
        self,
        session: str,
        memory: int,
        seconds: float,
        step_seconds: float | None = None,
        nadir: float | None = None,
    ) -> None:
        """Say what was observed of a session.

        Parameters
        ----------
        session : str
        memory : int
            Bytes that it has in use.
        seconds : float
            For how long it has executed since the last time.
        step_seconds : float, optional
            Seconds of execution between repetitions of its log, if there are any.
        nadir : float, optional
            Where in a step its memory is least: a fraction of the step, in [0, 1).
        """

    def switched(self, device: str, nbytes: int, seconds: float) -> None:
        """A session was brought onto a device with so many bytes, in so many seconds."""

    def contended(self, session: str) -> bool:
        """Whether somebody waits for what a session has."""

    def outlook(self, session: str) -> Outlook | None:
        """Say what a session can expect that waits; None: it does not, or nobody can say."""

    def sharing(self) -> dict[str, Any]:
        """Say what has come of the decisions so far, for people and machines."""

    def policy(self) -> str:
        """Return the policy that holds, as text; empty if there is none."""

    def apply(self, text: str, *, dry: bool) -> dict[str, Any]:
        """Let another policy hold from now on; nobody who executes is disturbed.

        Parameters
        ----------
        text : str
        dry : bool
            Only say what would change.

        Returns
        -------
        dict
            ``affected``: whom that affects and how, each with a sentence ``text``; ``notes``:
            sentences on what of it means nothing here.

        Raises
        ------
        ControlError
            If it is no policy, or cannot hold here; what held before still does.
        """

    def decisions(self, session: str, count: int) -> list[dict[str, Any]]:
        """Return the last decisions about a session, for ``why``; called beside the loop.

        Parameters
        ----------
        session : str
            As whoever asks has named it.
        count : int

        Raises
        ------
        ControlError
            If there are none.
        """

    async def close(self) -> None:
        """End."""


class Everybody:
    """Lets all sessions execute at any time: the system shares the devices among them."""

    keeps = True

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._devices: dict[str, str] = {}

    def begin(self, hands: Hands, devices: dict[str, int]) -> None:
        self._hands = hands

    def opened(self, terms: Terms) -> None:
        self._devices[terms.session] = terms.device
        self._grant(terms.session)

    def _grant(self, session: str) -> None:
        self._hands.grant(session, self._devices[session], next(self._tokens))

    def changed(self, terms: Terms) -> None:
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

    def outlook(self, session: str) -> Outlook | None:
        return None

    def sharing(self) -> dict[str, Any]:
        return {}

    def policy(self) -> str:
        return ""

    def apply(self, text: str, *, dry: bool) -> dict[str, Any]:
        raise ControlError("This daemon shares devices by no policy.", "unavailable")

    def decisions(self, session: str, count: int) -> list[dict[str, Any]]:
        raise ControlError("This daemon decides nothing about sessions.", "unavailable")

    async def close(self) -> None:
        pass
