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
from typing import Protocol


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
    """

    session: str
    name: str
    owner: int
    device: str
    memory: int
    bound: bool


class Hands(Protocol):
    """What an arbiter has done. A session or token that is gone by now is no error."""

    def grant(self, session: str, device: str, token: int) -> None:
        """Bring a session onto a device, if it is not there, and let it execute: `started`."""

    def preempt(self, session: str, token: int) -> None:
        """Let a session execute no more, from the next operator on: `released`."""

    def evict(self, session: str, reason: str) -> None:
        """Take a session without a lease off its device: `evicted`, or `failed`."""

    def migrate(self, session: str, device: str) -> None:
        """Move a session without a lease: `moved`, or `failed`."""

    def explain(self, session: str, reason: str) -> None:
        """Say why a session waits, in a sentence for people."""


class Arbiter(Protocol):
    """Decides; see the module."""

    #: Whether leases are kept while there is nothing to do.
    keeps: bool

    def begin(self, hands: Hands, devices: dict[str, int]) -> None:
        """Begin to decide about devices, by id, with so many bytes each."""

    def opened(self, terms: Terms) -> None:
        """There is a session."""

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

    def lost(self, session: str) -> None:
        """Its worker died, and its lease is over; it wants another one."""

    def moved(self, session: str, device: str) -> None:
        """It belongs to a device from now on."""

    def evicted(self, session: str, device: str) -> None:
        """It is off its device."""

    def failed(self, session: str, device: str, decision: str, token: int, why: str) -> None:
        """What was decided (``grant``, ``evict``, ``migrate``) could not be done."""

    def measured(self, session: str, memory: int, seconds: float) -> None:
        """It has so many bytes in use, and has executed for so long since the last time."""

    def contended(self, session: str) -> bool:
        """Whether somebody waits for what a session has."""

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

    def lost(self, session: str) -> None:
        self._grant(session)

    def moved(self, session: str, device: str) -> None:
        self._devices[session] = device

    def evicted(self, session: str, device: str) -> None:
        pass

    def failed(self, session: str, device: str, decision: str, token: int, why: str) -> None:
        pass

    def measured(self, session: str, memory: int, seconds: float) -> None:
        pass

    def contended(self, session: str) -> bool:
        return False

    async def close(self) -> None:
        pass
