"""Messages between the agent, its zygotes and their workers.

A worker receives one command at a time. Each command has a reply, unless its description says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message

#: Exit status of a worker whose device rejects all further work of its process; see `DeviceLost`.
EXIT_DEVICE_LOST = 75
#: That of a worker which finds no memory on its device to execute the log again.
EXIT_NO_ROOM = 76
#: CUDA's errors after which a process can use its device no more and that only a kernel can cause:
#: an illegal address, an assertion, the stack, an illegal instruction, a misaligned address, the
#: address space, the program counter, what the driver names no better, and tensor memory that was
#: not freed.
PROGRAM_FAULTS = frozenset({700, 710, 714, 715, 716, 717, 718, 719, 721})
#: Those for which no kernel is to blame: a GPU that is unavailable or removed, memory that cannot
#: be corrected, NVLink, and what was contained by the hardware.
HARDWARE_FAULTS = frozenset({46, 214, 220, 226})


@dataclass(frozen=True)
class ZygoteReady(Message, kind="ZygoteReady"):
    """A zygote has imported torch and waits for commands; it sends `Error` if it cannot."""

    torch_version: str
    torch_directory: str
    library: str


@dataclass(frozen=True)
class Compiled(Message, kind="Compiled"):
    """Progress of the native part's compilation for a torch; sent repeatedly before `ZygoteReady`.

    Parameters
    ----------
    torch : str
        Its version, such as ``2.13``.
    done, total : int
        Compilation units; `total` is 0 while it is unknown.
    """

    torch: str
    done: int
    total: int


@dataclass(frozen=True)
class Spawn(Message, kind="Spawn"):
    """Command to a zygote: fork a worker that uses the one descriptor that comes with this."""

    token: int


@dataclass(frozen=True)
class Spawned(Message, kind="Spawned"):
    """The worker's process id; comes with its pidfd, opened before the zygote may reap it."""

    token: int
    pid: int


@dataclass(frozen=True)
class WorkerExited(Message, kind="WorkerExited"):
    """Notification of a worker's end: its exit status, or minus the signal that killed it."""

    pid: int
    status: int


@dataclass(frozen=True)
class Warm(Message, kind="Warm"):
    """Make a context on a GPU; answered by `Done` or `Error`. May precede `Open`.

    Parameters
    ----------
    device, visible, title : str
        As in `Open`.
    """

    device: str
    visible: str
    title: str = ""


@dataclass(frozen=True)
class Open(Message, kind="Open"):
    """First command to a worker, or after `Warm`; answered by `Opened` or `Error`.

    Comes with the descriptors of log, client page, worker page, agent page and arena. If
    `snapshot`, the tables of the snapshot to start from follow. If `readiness`, the file follows
    that marks which of the snapshot's extents are in the arena
    (`native/worker/snapshot/readiness.h`). If `contents` and `carried`, the tables come from
    `Departed`, and its other files follow; and if `base`, the tables of the snapshot from which a
    recovery starts.

    Parameters
    ----------
    session, device : str
        Id of the session; torch's name of the device.
    threads : int
        Compute threads of a software device.
    epoch : int
        Count of the session's workers.
    skip, starved : list of int
        Positions of records that killed earlier workers; and those of them where the cause was a
        lack of memory on the machine.
    why : list of str
        Text of the error that the notebook gets for each record in `skip`.
    snapshot, readiness, contents, carried, base : bool
        Which descriptors follow.
    gate : bool
        Whether its gate is open; not together with `prepare`. The worker has no `Lease` yet.
    prepare : bool
        Load all of the snapshot while another worker executes the session; answered when that is
        done. `Adopt` may follow, and `Gate` makes this the session's worker.
    careful_until : int
        Position of the log below which the worker of a GPU waits for each record's kernels: an
        earlier worker ended there, and now a device assertion is noticed at its own record.
    title : str
        Process title, as shown by `ps`: the user, the notebook and the device.
    visible : str
        UUID of the GPU, for ``CUDA_VISIBLE_DEVICES``; "" for a software device.
    seat : str
        The secret of the job whose sessions the process executes, one at a time, as `Host` brings
        them; "": it executes this session only.
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
    careful_until: int = 0
    title: str = ""
    starved: list[int] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    visible: str = ""
    seat: str = ""
    contents: bool = False
    carried: bool = False
    base: bool = False
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Host(Message, kind="Host"):
    """Serve one more session in this process, over the connection that comes with this.

    May be sent on the connection of any session of the process that has been opened, at any time;
    has no reply. The new connection is served as that of a new worker: `Open` follows there. `End`
    and the end of a connection concern only its session: when the memory of the session is free,
    the process closes the connection. The process exits with its last session. A connection counts
    as a session from the moment at which `Host` is received.
    """


@dataclass(frozen=True)
class ListContents(Message, kind="ListContents"):
    """List what the process's sessions hold; answered by `ContentsListed`.

    May precede `Open` on a connection that `Host` has brought. The process keeps what it has listed
    until it has opened that session.
    """


@dataclass(frozen=True)
class ContentsListed(Message, kind="ContentsListed"):
    """Reply: comes with a file of content ids, see `native/worker/snapshot/moved.h`."""


@dataclass(frozen=True)
class Opened(Message, kind="Opened"):
    """Reply: the worker executes, and still loads its snapshot if needed; or it is prepared."""


@dataclass(frozen=True)
class Gate(Message, kind="Gate"):
    """Open or close the gate; answered by `Done`; a prepared worker may also answer `Error`."""

    open: bool


@dataclass(frozen=True)
class Lease(Message, kind="Lease"):
    """Give or take the permission to execute, which is needed in addition to an open gate.

    Has no reply, and may come at any time. After the lease was taken, the worker sends `Quiesced`
    when it executes nothing any more. A token lower than one seen before is stale and has no
    effect. If the program reaches its memory minimum within `within` seconds, the lease is taken
    there; otherwise at the end of that time.
    """

    token: int
    given: bool
    within: float = 0.0


@dataclass(frozen=True)
class Quiesced(Message, kind="Parked"):
    """Notification that nothing is executed any more after the lease with this token was taken."""

    token: int


@dataclass(frozen=True)
class Observe(Message, kind="Observe"):
    """Request the step that the log repeats; answered by `Observed`; may come at any time.

    Steps are counted from `since_ns` (monotonic clock) on.
    """

    since_ns: int


@dataclass(frozen=True)
class Observed(Message, kind="Observed"):
    """The step that a session's log repeats: its number of records, or 0 if nothing repeats.

    The step's memory minimum, `memory_min` bytes, is after its record `nadir`. Since the time of
    the request's `since_ns`, `made` records were executed in `seconds`.
    """

    records: int
    nadir: int = 0
    memory_min: int = 0
    memory_max: int = 0
    made: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class GiveBackCache(Message, kind="GiveBackCache"):
    """Give the device memory back that is kept for the next tensors; answered by `CacheGivenBack`.

    May come at any time. A worker obeys while it executes, and also while its gate is closed or it
    has no lease.
    """


@dataclass(frozen=True)
class CacheGivenBack(Message, kind="CacheGivenBack"):
    """The worker has given back the memory that it kept, as far as it could.

    Parameters
    ----------
    kept : int
        Bytes that it could not give back, as they are parts of blocks that are in use.
    """

    kept: int = 0


@dataclass(frozen=True)
class NeedRoom(Message, kind="NeedRoom"):
    """Notification from a worker: its device has no memory for an operator, although it was
    granted. It waits for `RoomMade`.
    """


@dataclass(frozen=True)
class RoomMade(Message, kind="RoomMade"):
    """The other workers have given back what they kept, as far as they could. Has no reply."""


@dataclass(frozen=True)
class TakeSnapshot(Message, kind="TakeSnapshot"):
    """Take a snapshot; answered by `SnapshotTaken` with the descriptor of its tables, or `Error`.

    With `stop`, nothing is executed until it is done. Otherwise the worker continues to execute,
    and accepts `Gate`, `Hurry` and `End` in the meantime. With `patient`, it may wait for the point
    in the program's steps where copying disturbs it least. With `tell`, it sends `Frozen` first.
    """

    stop: bool = False
    patient: bool = False
    tell: bool = False


@dataclass(frozen=True)
class Frozen(Message, kind="Frozen"):
    """Notification that the snapshot's content is final; it is still being copied."""


@dataclass(frozen=True)
class Hurry(Message, kind="Hurry"):
    """Let the snapshot that is being taken use all available cores. Has no reply.

    With `drop`, a patient one fails instead, and others hurry.
    """

    drop: bool = False


@dataclass(frozen=True)
class SnapshotTaken(Message, kind="SnapshotTaken"):
    """Reply: a snapshot of all device state at `position` of the log.

    Its tables come with this; its extents are in the arena.

    Parameters
    ----------
    position : int
    bytes : int
        Size of the state.
    copied : int
        How many of these bytes had changed since the previous snapshot.
    stalled_ns : int
        Nanoseconds for which it blocked the execution of the log.
    seconds : float
        Its duration.
    """

    position: int
    bytes: int
    copied: int
    stalled_ns: int
    seconds: float


@dataclass(frozen=True)
class Depart(Message, kind="Depart"):
    """Save what the session takes along to a process; answered by `Departed` or `Error`.

    The file of that process's `ContentsListed` comes with this. Nothing is executed meanwhile, and
    nothing changes here: see Note [Moves] in `native/worker/snapshot/moved.h`.
    """


@dataclass(frozen=True)
class Departed(Message, kind="Departed"):
    """Reply: all device state, to be opened by another process.

    Three files come with this: the tables, the contents of all storages, and the bytes of those
    that neither the process nor the arena has. The last one becomes the memory of the storages.

    Parameters
    ----------
    copied : int
        Bytes in the last file.
    omitted : int
        Number of storages whose bytes the process has.
    """

    copied: int
    omitted: int


@dataclass(frozen=True)
class Trim(Message, kind="Trim"):
    """Free the memory of snapshots before `retained`; answered by `Done` or `Error`."""


@dataclass(frozen=True)
class Preallocate(Message, kind="Preallocate"):
    """Take the memory that the next snapshot or move needs, while the log is executed.

    Ends early at `Hurry`. Answered by `Done` or `Error`.
    """


@dataclass(frozen=True)
class Adopt(Message, kind="Adopt"):
    """Command to a prepared worker: switch to a newer snapshot, whose tables come with this.

    Answered by `Done` or `Error`. After `Error` the worker cannot be used any more.
    """


@dataclass(frozen=True)
class Replay(Message, kind="Replay"):
    """Open the gate; answered by `Done` when all before `until` is executed, or by `Error`."""

    until: int


@dataclass(frozen=True)
class End(Message, kind="End"):
    """End the session; answered by the end of its connection, and with the last session by the
    exit of the process. A snapshot that is being taken is aborted.
    """


@dataclass(frozen=True)
class Ended(Message, kind="Ended"):
    """Notification from a worker: it found a corrupt log and ends."""

    message: str


@dataclass(frozen=True)
class DeviceLost(Message, kind="DeviceLost"):
    """Notification from a worker: its device rejects all further work of its process, which ends
    with the status `EXIT_DEVICE_LOST`.

    Parameters
    ----------
    code : int
        Number of the error, as CUDA's driver and runtime have it; 0: unknown.
    message : str
        The device's words, one line: ``CUDA error: device-side assert triggered``.
    operation : str
        What was being executed; often not what is to blame. Empty: nothing.
    """

    code: int
    message: str
    operation: str
