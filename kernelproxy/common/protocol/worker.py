"""Between the agent, its zygotes, and their workers.

A worker is given one order at a time, each answered unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class ZygoteReady(Message, kind="ZygoteReady"):
    """A zygote has imported torch and waits for orders; `Error` if it cannot."""

    torch_version: str
    torch_directory: str
    library: str


@dataclass(frozen=True)
class Compiled(Message, kind="Compiled"):
    """Comes again and again before `ZygoteReady`, while the native part for a torch is compiled.

    Parameters
    ----------
    torch : str
        Its version, such as ``2.13``.
    done, total : int
        Units; no total while nobody knows it.
    """

    torch: str
    done: int
    total: int


@dataclass(frozen=True)
class Spawn(Message, kind="Spawn"):
    """Order to a zygote: fork a worker around the one descriptor that comes with this."""

    token: int


@dataclass(frozen=True)
class Spawned(Message, kind="Spawned"):
    """The worker's process id; comes with its pidfd, opened before the zygote may reap it."""

    token: int
    pid: int


@dataclass(frozen=True)
class WorkerExited(Message, kind="WorkerExited"):
    """How a worker ended: its exit status, or minus the signal that killed it."""

    pid: int
    status: int


@dataclass(frozen=True)
class Open(Message, kind="Open"):
    """First order to a worker; comes with log, client, worker, agent and arena descriptors and, if
    `snapshot`, the tables of the snapshot to start from, and, if `readiness`, the file that says
    which of its extents are in the arena (`native/worker/snapshot/readiness.h`). Answered by
    `Opened` or `Error`.

    Parameters
    ----------
    session, device : str
        Id of the session; torch's name of the device.
    threads : int
        Compute threads of a software device.
    epoch : int
        Count of the session's workers.
    skip, starved : list of int
        Positions of records that killed earlier workers; those of them for which the machine had
        not enough memory.
    snapshot, readiness : bool
        Which descriptors follow.
    gate : bool
        Whether its gate is open; not with `prepare`. It has no `Lease` yet.
    prepare : bool
        Load all of the snapshot while another worker executes the session; answered when that is
        done. `Adopt` may follow, and `Gate` makes it the session's worker.
    careful : bool
        Whether a worker before it ended by itself: on a GPU it waits for each kernel, so that one
        which asserts is found at its own record.
    title : str
        What `ps` shall show of it: whose it is, of which notebook, and where.
    """

    session: str
    device: str
    threads: int
    epoch: int
    skip: list[int]
    snapshot: bool
    gate: bool
    readiness: bool = False
    prepare: bool = False
    careful: bool = False
    title: str = ""
    starved: list[int] = field(default_factory=list)
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Opened(Message, kind="Opened"):
    """The worker executes, and loads what is still to be loaded; or it is prepared."""


@dataclass(frozen=True)
class Gate(Message, kind="Gate"):
    """Open or close the gate; answered by `Done`, or, by a prepared worker, `Error`."""

    open: bool


@dataclass(frozen=True)
class Lease(Message, kind="Lease"):
    """Give or take the permission to execute, which is needed beside an open gate.

    Has no answer, and may come at any time: a worker without a lease sends `Parked` when nothing
    is executed any more. A token below one that it has seen is stale, and changes nothing. If the
    program's memory is least within so many seconds, the lease is taken there; otherwise then.
    """

    token: int
    given: bool
    within: float = 0.0


@dataclass(frozen=True)
class Parked(Message, kind="Parked"):
    """Since the lease with this token was taken nothing is executed any more."""

    token: int


@dataclass(frozen=True)
class Observe(Message, kind="Observe"):
    """Answered by `Observed`, at any time: the step that the log repeats.

    `since_ns`, of the monotonic clock, says from when on steps are counted.
    """

    since_ns: int


@dataclass(frozen=True)
class Observed(Message, kind="Observed"):
    """The step that a session's log repeats: so many records, or 0 if nothing repeats.

    After the record `nadir` of these least memory is in use, `memory_min` bytes. Since the moment
    asked for, `made` records were executed in `seconds`.
    """

    records: int
    nadir: int = 0
    memory_min: int = 0
    memory_max: int = 0
    made: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class TakeSnapshot(Message, kind="TakeSnapshot"):
    """Answered by `SnapshotTaken` with the descriptor of the snapshot's tables, or `Error`.

    With `stop` nothing is executed until it is done. Otherwise the worker goes on, and takes
    `Gate`, `Hurry` and `End` meanwhile; with `patient` it may wait for a moment in the program's
    steps when copying disturbs it least; with `tell` it sends `Frozen` first.
    """

    stop: bool = False
    patient: bool = False
    tell: bool = False


@dataclass(frozen=True)
class Frozen(Message, kind="Frozen"):
    """What the snapshot will hold does not change any more; it is still being copied."""


@dataclass(frozen=True)
class Hurry(Message, kind="Hurry"):
    """A snapshot that is being taken shall take all the cores it can get. Has no answer."""


@dataclass(frozen=True)
class SnapshotTaken(Message, kind="SnapshotTaken"):
    """All device state at `position` of the log: the tables that come with it, and their extents
    in the arena.

    Parameters
    ----------
    position : int
    bytes : int
        What it stands for.
    copied : int
        Bytes of these that had changed since the snapshot before.
    stalled_ns : int
        Nanoseconds for which it kept the log from being executed.
    seconds : float
        What it took.
    """

    position: int
    bytes: int
    copied: int
    stalled_ns: int
    seconds: float


@dataclass(frozen=True)
class Trim(Message, kind="Trim"):
    """Give back the memory of snapshots before `retained`; answered by `Done` or `Error`."""


@dataclass(frozen=True)
class Adopt(Message, kind="Adopt"):
    """To a prepared worker: take over a newer snapshot, whose tables come with this. Answered by
    `Done` or `Error`, after which the worker is of no use.
    """


@dataclass(frozen=True)
class Replay(Message, kind="Replay"):
    """Open the gate; answered by `Done` when everything below `until` was executed, or `Error`."""

    until: int


@dataclass(frozen=True)
class End(Message, kind="End"):
    """End the worker; answered by its exit. A snapshot that is being taken is given up."""


@dataclass(frozen=True)
class Ended(Message, kind="Ended"):
    """Sent by a worker unasked: it met a corrupt log and ends."""

    message: str
