"""Events that the engine receives.

Every event carries `at`, in seconds on a monotonic clock. Sizes are bytes. Events with a token that
is not the session's current one, or of an unknown session, are ignored: they answer decisions that
are outdated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from jupyter_sing.scheduler.decisions import Guarantees
from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.scheduler.settings import EngineSettings, Tier


@dataclass(frozen=True, slots=True)
class SessionAdded:
    """A session was opened. It needs no device until its first `CellSubmitted`.

    Attributes
    ----------
    weight
        Its share among the sessions of its user; usually 1.
    gpus
        Devices that it needs at once.
        Of a gang, the most that it can use.
    memory
        Bytes that it holds per device, of a gang per rank, as far as is known; `Measured` corrects
        it.
    pinned
        Its memory is never evicted or moved.
    may_pack
        Its user allows another session to execute on its device at the same time.
    device
        Its home: where it is `resident` already, and, if it is pinned, where it is to execute.
    may_preempt
        True if its gate can be closed in the middle of a cell. Otherwise, where suspension is
        impossible, it is scheduled between cells.
    bound
        The one device that its user has chosen. It is granted only there, and never moved by the
        engine; a `Moved` without a `MigrateMemory` binds it to another one.
    gpus_min
        It is a gang, the ranks of a job: it executes on any number of devices of one node from this
        one to `gpus`, which changes while it executes, and ranks share a device if there are fewer
        devices than ranks. A gang is neither pinned nor bound, and shares no device with others.
        None: it needs exactly `gpus` devices.
    ranks
        Ranks of a gang, at least `gpus`. 0: as many as `gpus`.
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
    gpus_min: int | None = None
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class SessionRemoved:
    """The session was closed: its lease and its memory are free, without further answers."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class TermsChanged:
    """A user or an administrator changed the terms of an open session.

    If `vc` or `user` is not None, the session belongs to that virtual cluster or user from now on.
    Its present lease stays until it ends, by the right by which it was granted. `device` is where a
    pinned session is, or begins: it is granted only there.
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
    """The session needs a device from now on (sent at the first operator of a cell)."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class CellFinished:
    """The device work of a cell is done and synchronised. The lease ends without a `Released`."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class Started:
    """The lease executes: whatever had to be loaded or moved for it is on its devices."""

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
    """Answer to `Evict`: the bytes of the session are off the device."""

    at: float
    session: SessionId
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Moved:
    """Answer to `MigrateMemory`: the session belongs to `device`.

    Its memory is there, if it is `resident`, and on no other device. Without a `MigrateMemory`, it
    also ends a lease of another device.
    """

    at: float
    session: SessionId
    device: DeviceId
    resident: bool = True


@dataclass(frozen=True, slots=True)
class Located:
    """The bytes of a gang on each device are these, and on all other devices there are none.

    Sent when that changes other than by a grant: ranks come and go one by one. On the devices of
    its lease, room for all of its ranks is counted until the lease is over.
    """

    at: float
    session: SessionId
    places: tuple[tuple[DeviceId, int], ...]


@dataclass(frozen=True, slots=True)
class GrantRefused:
    """A `Grant` failed: its lease is over, and the memory of the session is where it was before.

    Also the answer to a `Preempt` that has overtaken the grant.
    """

    at: float
    session: SessionId
    token: int
    why: str


@dataclass(frozen=True, slots=True)
class Stayed:
    """An `Evict` or `MigrateMemory` failed: the session is still on `device`."""

    at: float
    session: SessionId
    device: DeviceId
    why: str


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker ended, and its device memory is lost; its cell still needs a device."""

    at: float
    session: SessionId


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """The device failed: all on it is lost, and it is not granted until `DeviceHealed`."""

    at: float
    device: DeviceId


@dataclass(frozen=True, slots=True)
class DeviceHealed:
    """The device may be used again, and is empty."""

    at: float
    device: DeviceId


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a session.

    Attributes
    ----------
    memory
        Bytes that it holds per device, of a gang per rank.
    seconds_used
        Seconds that it really executed since the last `Measured`.
    step_seconds
        Seconds between repetitions of its log; None if there are none.
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
    """A switch to this device takes `constant_seconds + bytes / bytes_per_second`, as measured."""

    at: float
    device: DeviceId
    bytes_per_second: float
    constant_seconds: float


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """Other settings apply from now on. Running cells are not interrupted.

    `guarantees` are new ones that replace the present ones; None: those stay. Sessions that hold
    devices keep them, within the new guarantees where these allow it; reservations are made anew.
    """

    at: float
    settings: EngineSettings
    guarantees: Guarantees | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Sent at `Engine.next_tick()` if there was no event until then."""

    at: float


Event: TypeAlias = (
    SessionAdded
    | SessionRemoved
    | TermsChanged
    | CellSubmitted
    | CellFinished
    | Started
    | Released
    | Evicted
    | Moved
    | Located
    | GrantRefused
    | Stayed
    | WorkerDied
    | DeviceFailed
    | DeviceHealed
    | Measured
    | BandwidthMeasured
    | Reconfigured
    | Tick
)
