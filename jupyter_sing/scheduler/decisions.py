"""What the engine wants done, and what it asks the guarantees.

`reason` is one sentence for people. Decisions of one list are to be begun in order, and need not be
finished in order: what depends on another one is decided only when that one was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from jupyter_sing.scheduler.ids import DeviceId, SessionId


@dataclass(frozen=True, slots=True)
class Grant:
    """Load the session on these devices, if it is not there, and open its gate.

    Answered by `Started` or `Refused`. The room for its memory is free already. If it is resident
    elsewhere, it moves: its memory there is free once it has started here. `quantum` is how long it
    will run before others of its kind get their turn; the engine says `Preempt` itself.
    """

    session: SessionId
    devices: tuple[DeviceId, ...]
    token: int
    quantum: float
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Close the gate between two operators. Answered by `Released`, `CellFinished` or `Refused`.

    If the memory nadir of a step comes within `at_nadir_within` seconds, close it there: less has
    to be moved then.
    """

    session: SessionId
    token: int
    reason: str
    at_nadir_within: float = 0.0


@dataclass(frozen=True, slots=True)
class Evict:
    """Take the memory of a session that holds no lease off the device.

    Answered by `Evicted` or `Stayed`.
    """

    session: SessionId
    device: DeviceId
    to: Literal["host", "disk"]
    reason: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move the memory of a session that holds no lease. Answered by `Moved` or `Stayed`."""

    session: SessionId
    source: DeviceId
    target: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Pack:
    """These sessions execute on the device at once from now on (their grants come separately)."""

    sessions: tuple[SessionId, ...]
    device: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Unpack:
    """They take turns again; whoever has to stop gets a `Preempt`."""

    sessions: tuple[SessionId, ...]
    device: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The session waits. Said once when it begins to wait, for people.

    What it can expect is told to those who ask, by `Engine.outlooks`.
    """

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class Promised:
    """What the tier of a session promises holds for it from now on (`kept`), or does not.

    Said when that changes: to begin with, it holds.
    """

    session: SessionId
    kept: bool
    reason: str


Decision: TypeAlias = Grant | Preempt | Evict | Migrate | Pack | Unpack | Queued | Promised


@dataclass(frozen=True, slots=True)
class Bound:
    """The request holds these devices. `guaranteed`: no other virtual cluster can take them."""

    devices: tuple[DeviceId, ...]
    guaranteed: bool


@dataclass(frozen=True, slots=True)
class Victims:
    """The devices are reserved for the request; these requests must be released first.

    Then `place` is asked again and answers `Bound`.
    """

    devices: tuple[DeviceId, ...]
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing suits now; asking again after a release may help. Nothing is reserved."""

    reason: str


class Guarantees(Protocol):
    """Which request may hold which devices, with which right.

    A request is named by its session. A call that returns `Wait` has changed nothing. All methods
    are deterministic.
    """

    def place(
        self, request: str, vc: str, priority: int, leaves: int, prefer: Sequence[DeviceId]
    ) -> Bound | Victims | Wait:
        """Find devices for a request.

        Parameters
        ----------
        request
            Who asks. It holds nothing, or a reservation from an earlier `Victims`.
        vc
            Its virtual cluster.
        priority
            -1: opportunistic; 0 to 1000: within the guarantee of the virtual cluster.
        leaves
            Devices that it needs.
        prefer
            Devices that would cost least, best first; honoured where it costs no guarantee.
        """
        ...

    def release(self, request: str) -> None:
        """Give back what a request holds."""
        ...

    def cancel(self, request: str) -> None:
        """Give back what is reserved for a request; its victims keep what they hold."""
        ...

    def set_health(self, device_or_node: str, good: bool) -> None:
        """Note that a device, or all of a node, cannot or can be used."""
        ...

    def free(self, vc: str) -> int:
        """Count the devices that this virtual cluster could still be guaranteed now."""
        ...

    def adopt(self, request: str, vc: str, devices: Sequence[DeviceId]) -> bool:
        """Note that a request holds these devices, which nobody else does, already.

        Returns
        -------
        bool
            Whether its virtual cluster is guaranteed them. Otherwise they are borrowed.
        """
        ...

    def widest(self) -> int:
        """Count the devices that one request could have at most, if nobody else had any."""
        ...
