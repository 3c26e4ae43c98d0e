"""What the engine is told.

Every event carries `at`, in seconds on a clock that never goes back. Sizes are bytes. Events whose
token is not the session's current one, or whose session is unknown, change nothing: they are
answers to what has been overtaken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from jupyter_sing.scheduler.decisions import Guarantees
from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.scheduler.settings import Settings, Tier


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session exists from now on. It asks for nothing until its first `CellSubmitted`.

    Attributes
    ----------
    weight
        Its share among the sessions of its user; 1 is usual.
    gpus
        Devices that it needs at once.
    memory
        Bytes that it holds per device, as far as anybody knows; `Measured` corrects it.
    pinned
        Its memory is never evicted and it is never moved.
    may_pack
        Its user allows another session to execute on its device at the same time.
    device
        Its home: where it is `resident` already, and, if it is pinned, where it is to execute.
    may_preempt
        Whether its gate can be closed in the middle of a cell. Where suspension is impossible, it
        is scheduled at the borders of cells.
    bound
        The one device that its user wants. It is granted there only, and never sent elsewhere; an
        unasked `Moved` binds it to another one.
    """

    at: float
    session: SessionId
    vc: str
    user: str
    tier: Tier = Tier.STANDARD
    weight: float = 1.0
    gpus: int = 1
    memory: int = 0
    pinned: bool = False
    may_pack: bool = False
    device: DeviceId | None = None
    may_preempt: bool = True
    bound: DeviceId | None = None
    resident: bool = True


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """It is over: its lease and its memory are free, without further answers."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class TermsChanged:
    """What a user or an administrator may change of an open session.

    Where `vc` or `user` are not None, it is that virtual cluster's or user's from now on. A lease
    that it has stays, by the right by which it was given, until it ends. `device` is where a pinned
    session is, or begins: it is granted there only.
    """

    at: float
    session: SessionId
    tier: Tier
    weight: float
    pinned: bool
    may_pack: bool
    vc: str | None = None
    user: str | None = None
    device: DeviceId | None = None


@dataclass(frozen=True, slots=True)
class CellSubmitted:
    """It has work for a device from now on (said at a cell's first operator)."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class CellFinished:
    """Its device work is done and synchronised. The lease is free without a `Released`."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class Started:
    """The work of a lease executes: what had to be loaded or moved for it is there."""

    at: float
    session: SessionId
    token: int


@dataclass(frozen=True, slots=True)
class Released:
    """Answer to `Preempt`: the gate is closed, the device free of execution. Memory stays."""

    at: float
    session: SessionId
    token: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Answer to `Evict`: its bytes are off the device."""

    at: float
    session: SessionId
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Moved:
    """Answer to `Migrate`: it belongs to `device`, and its memory is nowhere else: there, if it is
    `resident`. Unasked, it also ends a lease of another device.
    """

    at: float
    session: SessionId
    device: DeviceId
    resident: bool = True


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing came of a `Grant`: its lease is over, and the memory of the session is where it was
    before. Also an answer to a `Preempt` that has overtaken the grant.
    """

    at: float
    session: SessionId
    token: int
    why: str


@dataclass(frozen=True, slots=True)
class Stayed:
    """Nothing came of an `Evict` or `Migrate`: the session is still on `device`, which it was to
    leave.
    """

    at: float
    session: SessionId
    device: DeviceId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """Its worker is gone and its device memory with it; its cell still wants a device."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """Whatever was on the device is lost, and nothing is granted there until it is healed."""

    at: float
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceHealed:
    """The device may be used again, and is empty."""

    at: float
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Measured:
    """What was observed of a session.

    Attributes
    ----------
    memory
        Bytes that it holds per device.
    seconds_used
        Seconds that it really executed since the last `Measured`.
    step_seconds
        Seconds between repetitions of its log, None if there are none.
    nadir
        Where in a step its memory is least: a fraction of the step, in [0, 1).
    """

    at: float
    session: SessionId
    memory: int
    seconds_used: float
    step_seconds: float | None = None
    nadir: float | None = None


@dataclass(frozen=True, slots=True)
class BandwidthMeasured:
    """A switch to this device was found to take `constant_seconds + bytes / bytes_per_second`."""

    at: float
    device: DeviceId
    bytes_per_second: float
    constant_seconds: float


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Other settings hold from now on. Running cells stay as they are.

    `guarantees` are fresh ones that hold instead of those before, None: those stay. Who holds
    devices keeps them, by the new guarantees where these allow it; reservations are made anew.
    """

    at: float
    settings: Settings
    guarantees: Guarantees | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Sent at `Engine.next_tick()` if nothing happened until then."""

    at: float


Event: TypeAlias = (
    SessionOpened
    | SessionClosed
    | TermsChanged
    | CellSubmitted
    | CellFinished
    | Started
    | Released
    | Evicted
    | Moved
    | Refused
    | Stayed
    | WorkerDied
    | DeviceFailed
    | DeviceHealed
    | Measured
    | BandwidthMeasured
    | Reconfigured
    | Tick
)
