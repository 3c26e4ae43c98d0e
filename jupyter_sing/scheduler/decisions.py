"""Decisions of the engine, and its requests to the guarantees.

`kind` is the word for a decision in logs, `reason` one user-facing sentence. The decisions of a
list must be begun in order, but need not finish in order: a decision that depends on another one is
only made when that one was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

from jupyter_sing.scheduler.ids import DeviceId, SessionId


@dataclass(frozen=True, slots=True)
class Grant:
    """Load the session on these devices, unless it is resident there, and open its gate.

    Answered by `Started` or `GrantRefused`. There is room for its memory already. If it is resident
    elsewhere, it migrates: its memory there is free once it has started here. `quantum` is how long
    it runs before sessions of equal rank get their turn; the engine sends the `Preempt` itself.
    """

    kind: ClassVar[str] = "grant"
    session: SessionId
    devices: tuple[DeviceId, ...]
    token: int
    quantum: float
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Close the gate between two operators.

    Answered by `Released`, `CellFinished` or `GrantRefused`.

    If the memory nadir of a step comes within `at_nadir_within` seconds, close it there: less has
    to be moved then.

    A gang that only changes its number of devices is stopped for that, too: `resize` is the number
    on which it is granted at once after `Released`, as far as they are still free; 0: it waits.
    """

    kind: ClassVar[str] = "preempt"
    session: SessionId
    token: int
    reason: str
    at_nadir_within: float = 0.0
    resize: int = 0


@dataclass(frozen=True, slots=True)
class PrepareResize:
    """A gang is likely to be resized to these devices soon: prepare what shortens that.

    Not answered. The gang continues to execute, and may be resized otherwise, or not at all.
    """

    kind: ClassVar[str] = "prepare"
    session: SessionId
    devices: tuple[DeviceId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Take the memory of a session that holds no lease off the device.

    Answered by `Evicted` or `Stayed`.
    """

    kind: ClassVar[str] = "evict"
    session: SessionId
    device: DeviceId
    to: Literal["host", "disk"]
    reason: str


@dataclass(frozen=True, slots=True)
class MigrateMemory:
    """Move the memory of a session that holds no lease. Answered by `Moved` or `Stayed`."""

    kind: ClassVar[str] = "migrate"
    session: SessionId
    source: DeviceId
    target: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Pack:
    """Let these sessions execute on the device at the same time (their grants come separately)."""

    kind: ClassVar[str] = "pack"
    sessions: tuple[SessionId, ...]
    device: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Unpack:
    """End a `Pack`: the sessions take turns again; one that has to stop gets a `Preempt`."""

    kind: ClassVar[str] = "unpack"
    sessions: tuple[SessionId, ...]
    device: DeviceId
    reason: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The session waits: a user-facing notice, sent once when it begins to wait.

    `Engine.outlooks` returns how long it is likely to wait.
    """

    kind: ClassVar[str] = "queued"
    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class GuaranteeChanged:
    """The tier target of a session is kept from now on (`kept`), or can no longer be kept.

    Sent when this changes. Initially it is kept.
    """

    kind: ClassVar[str] = "promised"
    session: SessionId
    kept: bool
    reason: str


Decision: TypeAlias = (
    Grant
    | Preempt
    | PrepareResize
    | Evict
    | MigrateMemory
    | Pack
    | Unpack
    | Queued
    | GuaranteeChanged
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The request holds these devices. `guaranteed`: no other virtual cluster can take them."""

    devices: tuple[DeviceId, ...]
    guaranteed: bool


@dataclass(frozen=True, slots=True)
class Victims:
    """The devices are reserved for the request; these requests must be released first.

    After that, `place` must be called again and returns `Bound`.
    """

    devices: tuple[DeviceId, ...]
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Nothing suits now; a retry after a release may succeed. Nothing is reserved."""

    reason: str


class GuaranteesError(Exception):
    """Base of all errors of the guarantees."""


class RequestError(GuaranteesError):
    """The request could never be served as it stands. Nothing was changed."""


class Guarantees(Protocol):
    """Rights of requests to devices: which request may hold which devices, guaranteed or borrowed.

    A request is named by its session. A call that returns `NoPlacement` has changed nothing. All
    methods are deterministic.
    """

    def place(
        self, request: str, vc: str, priority: int, leaves: int, prefer: Sequence[DeviceId]
    ) -> Bound | Victims | NoPlacement:
        """Find devices for a request.

        Parameters
        ----------
        request
            The request. It holds nothing, or a reservation from an earlier `Victims`.
        vc
            Its virtual cluster.
        priority
            -1: opportunistic; 0 to 1000: within the guarantee of the virtual cluster.
        leaves
            Number of devices that it needs.
        prefer
            Devices that would cost least, best first; followed where that costs no guarantee.
        """
        ...

    def release(self, request: str) -> None:
        """Release what a request holds."""
        ...

    def cancel(self, request: str) -> None:
        """Cancel the reservation of a request; its victims keep what they hold."""
        ...

    def set_health(self, device_or_node: str, good: bool) -> None:
        """Mark a device, or all devices of a node, as usable or not.

        Raises
        ------
        RequestError
            If the guarantees do not contain it.
        """
        ...

    def free(self, vc: str) -> int:
        """Return the number of devices that this virtual cluster could still be guaranteed now."""
        ...

    def adopt(self, request: str, vc: str, devices: Sequence[DeviceId]) -> bool:
        """Record that a request already holds these devices, which no other request holds.

        Returns
        -------
        bool
            True if its virtual cluster is guaranteed them; otherwise they are borrowed.
        """
        ...

    def widest(self) -> int:
        """Return the number of devices that one request could have at most, if all were free."""
        ...
