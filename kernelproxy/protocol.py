"""Typed messages between front ends, kernels, agent, zygotes and workers (standard library only).

`kernelproxy.frames` puts them on a stream socket.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """Base of all messages."""


# Requests to the agent.


@dataclass(frozen=True)
class Status(Message):
    """Ask for all devices and sessions; answered by `StatusReply`."""


@dataclass(frozen=True)
class OpenSession(Message):
    """Make a session for a kernel that is about to start; answered by `SessionOpened`.

    Parameters
    ----------
    name : str
        Name for people; need not be unique.
    kernel_id : str
        Jupyter's id of the kernel, or "".
    python : str
        Path of the kernel's interpreter.
    idle_timeout : float or None
        Seconds without use after which the session is suspended; 0 or less: never; None: the
        daemon's default.
    device : str or None
        Id of a device; None: the agent chooses.
    script : bool
        Whether a program runs in it instead of a notebook.
    key : str
        Made up by who asks: the same request, made again, opens no second session.
    """

    name: str
    kernel_id: str
    python: str
    idle_timeout: float | None = None
    device: str | None = None
    script: bool = False
    key: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class CloseSession(Message):
    """End a session and free all it has; answered by `Done`, also if it is gone already."""

    session: str


@dataclass(frozen=True)
class Attach(Message):
    """Sent by the kernel process itself; answered by `Attached` with the descriptors of log,
    client page, worker page and agent page. The connection then belongs to the session: the
    client sends `Bell` on it, and its end is the session's end. If it ended because the daemon
    died, the same process attaches again.
    """

    session: str
    torch_version: str


@dataclass(frozen=True)
class Suspend(Message):
    """End a session's worker and keep its state; answered by `SessionReply` when it is done."""

    session: str
    reason: str = ""


@dataclass(frozen=True)
class Resume(Message):
    """Bring a session back onto its device; answered by `SessionReply` when it is there."""

    session: str


@dataclass(frozen=True)
class Migrate(Message):
    """Move a session to another device while it runs; answered by `SessionReply` when it is
    there. Moving it to where it is already is no error.
    """

    session: str
    device: str


@dataclass(frozen=True)
class Checkpoint(Message):
    """Put a notebook away; answered by `CheckpointReply` when it is safe on disk.

    From the kernel itself it comes with two files, of its host state and of the content of its
    files, described by `host`, and is
    answered by `CheckpointBegun` first: from then on the kernel may go on. From others it comes
    without, and the agent asks the kernel by a `Wish`.

    Parameters
    ----------
    session : str
    name : str
        "": one is made up.
    automatic : bool
        Whether nobody asked for it.
    host : dict or None
        See `kernelproxy.agent.checkpoints.Host`.
    """

    session: str
    name: str = ""
    automatic: bool = False
    host: dict[str, Any] | None = None


@dataclass(frozen=True)
class Restore(Message):
    """Put the notebook of a checkpoint in the place of a session's; answered by `RestoreReply`
    when the kernel has done it, as soon as no cell runs.
    """

    session: str
    name: str


@dataclass(frozen=True)
class Carried(Message):
    """Sent by a kernel: what has come of a `Wish`; answered by `Done`. A checkpoint that was made
    is no news to the agent.

    Parameters
    ----------
    session, verb, name : str
        As in the wish.
    problem : str
        Why it was not carried out; "" if it was.
    outcome : dict
        Of a restoration, see `RestoreReply`.
    """

    session: str
    verb: str
    name: str
    problem: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints(Message):
    """Ask for all checkpoints of the user; answered by `CheckpointsReply`."""


@dataclass(frozen=True)
class OpenCheckpoint(Message):
    """Read a checkpoint; answered by `CheckpointOpened` when all of it was read and verified."""

    name: str


@dataclass(frozen=True)
class DeleteCheckpoint(Message):
    """Forget a checkpoint and give back its space; answered by `Done`."""

    name: str


@dataclass(frozen=True)
class Prepare(Message):
    """Start what sessions of an interpreter will need; answered by `Done` at once."""

    python: str


@dataclass(frozen=True)
class Stop(Message):
    """End the daemon and every session; answered by `Done` when all sessions have ended."""


@dataclass(frozen=True)
class Bell(Message):
    """Sent by a client: look at my pages. Has no answer."""


# Replies of the agent.


@dataclass(frozen=True)
class StatusReply(Message):
    """Devices and sessions, each exactly as ``jupyter sing status --json`` shows it."""

    devices: list[dict[str, Any]]
    sessions: list[dict[str, Any]]


@dataclass(frozen=True)
class SessionOpened(Message):
    """The id of a new session."""

    session: str


@dataclass(frozen=True)
class Attached(Message):
    """Comes with four descriptors: log, client page, worker page, agent page."""

    session: str


@dataclass(frozen=True)
class SessionReply(Message):
    """One session, as in `StatusReply`."""

    session: dict[str, Any]


@dataclass(frozen=True)
class CheckpointBegun(Message):
    """What the checkpoint holds does not change any more, whatever the notebook does."""


@dataclass(frozen=True)
class CheckpointReply(Message):
    """One checkpoint, as in `CheckpointsReply`."""

    checkpoint: dict[str, Any]


@dataclass(frozen=True)
class CheckpointsReply(Message):
    """Checkpoints, the newest first, as ``jupyter sing checkpoints --json`` shows them."""

    checkpoints: list[dict[str, Any]]


@dataclass(frozen=True)
class CheckpointOpened(Message):
    """Comes with three files: the host state's parts, one behind the other, device storages, and
    the content of the notebook's files, one behind the other.

    Parameters
    ----------
    checkpoint : dict
        As in `CheckpointsReply`.
    parts : list of int
        Length of each part in bytes; the first is the stream.
    storages : list of list of int
        Number, offset in the file, and bytes of each device storage.
    files : list of dict
        See `kernelproxy.hoststate.gathering.described`.
    """

    checkpoint: dict[str, Any]
    parts: list[int]
    storages: list[list[int]]
    files: list[dict[str, Any]]


@dataclass(frozen=True)
class Progress(Message):
    """Bytes done and in total; any number of these may come before another reply."""

    done: int
    total: int


@dataclass(frozen=True)
class RestoreReply(Message):
    """What was restored.

    Parameters
    ----------
    outcome : dict
        ``checkpoint`` (its name), ``variables`` and ``files`` (how many), ``aside`` (where those
        files are that were there), ``problems`` (each with ``name`` and ``why``).
    """

    outcome: dict[str, Any]


@dataclass(frozen=True)
class Wish(Message):
    """Sent to a kernel unasked, to be carried out between two cells.

    Parameters
    ----------
    verb : str
        ``checkpoint`` or ``restore``.
    name : str
        Of the checkpoint.
    automatic : bool
        Whether nobody asked for it.
    """

    verb: str
    name: str
    automatic: bool = False


@dataclass(frozen=True)
class Done(Message):
    """It is done; `message` is a sentence for people or empty."""

    message: str = ""


@dataclass(frozen=True)
class Error(Message):
    """It was not done.

    Parameters
    ----------
    message : str
        One sentence for people.
    reason : str
        One word: ``unknown-session``, ``ambiguous``, ``not-allowed``, ``no-room``,
        ``unknown-device``, ``unknown-checkpoint``, ``already-attached``, ``ended``,
        ``unavailable``, ``bad-request``, ``stopping``, ``failed``, or that of a `StoreError`; made
        by `control`: ``no-daemon``, ``timeout``.
    """

    message: str
    reason: str


# Between the agent and its keeper: first `Keep`, then deposits. To the next agent the keeper says
# the same, and `Done` behind it.


@dataclass(frozen=True)
class Keep(Message):
    """Who the two are; comes with the daemon's lock, its listening socket and the sender's pidfd.

    Parameters
    ----------
    command : list of str
        What starts the next agent; the number of its connection is put behind it.
    socket : str
        Path of the listening socket.
    """

    command: list[str]
    socket: str


@dataclass(frozen=True)
class Deposit(Message):
    """What a session is made of, in place of what was deposited for it before.

    Parameters
    ----------
    session : str
    record : dict
        See `Session.record`.
    names : list of str
        What the descriptors are that come with it. ``agent`` is the agent page, and each
        ``process`` the pidfd of a worker.
    """

    session: str
    record: dict[str, Any]
    names: list[str]


@dataclass(frozen=True)
class Withdraw(Message):
    """A session has ended: nothing of it is to be kept."""

    session: str


@dataclass(frozen=True)
class Farewell(Message):
    """The agent leaves, and nobody is to take its place; answered by the keeper's end."""


# Between the agent and its zygotes.


@dataclass(frozen=True)
class ZygoteReady(Message):
    """A zygote has imported torch and waits for orders; `Error` if it cannot."""

    torch_version: str
    torch_directory: str
    library: str


@dataclass(frozen=True)
class Spawn(Message):
    """Order to a zygote: fork a worker around the one descriptor that comes with this."""

    token: int


@dataclass(frozen=True)
class Spawned(Message):
    """The worker's process id; comes with its pidfd, opened before the zygote may reap it."""

    token: int
    pid: int


@dataclass(frozen=True)
class WorkerExited(Message):
    """How a worker ended: its exit status, or minus the signal that killed it."""

    pid: int
    status: int


# Between the agent and a worker: one order at a time, each answered unless it says otherwise.


@dataclass(frozen=True)
class Open(Message):
    """First order to a worker; comes with log, client, worker, agent and arena descriptors and, if
    `snapshot`, the tables of the snapshot to start from, and, if `readiness`, the file that says
    which of its extents are in the arena (`native/worker/readiness.h`). Answered by `Opened` or
    `Error`.

    Parameters
    ----------
    session, device : str
        Id of the session; torch's name of the device.
    threads : int
        Compute threads of a software device.
    epoch : int
        Count of the session's workers.
    skip : list of int
        Positions of calls that killed earlier workers.
    snapshot, readiness : bool
        Which descriptors follow.
    gate : bool
        Whether to execute at once; not with `prepare`.
    prepare : bool
        Load all of the snapshot while another worker executes the session; answered when that is
        done. `Adopt` may follow, and `Gate` makes it the session's worker.
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


@dataclass(frozen=True)
class Opened(Message):
    """The worker executes, and loads what is still to be loaded; or it is prepared."""


@dataclass(frozen=True)
class Gate(Message):
    """Open or close the gate; answered by `Done`, or, by a prepared worker, `Error`."""

    open: bool


@dataclass(frozen=True)
class TakeSnapshot(Message):
    """Answered by `SnapshotTaken` with the descriptor of the snapshot's tables, or `Error`.

    With `stop` nothing is executed until it is done. Otherwise the worker goes on, and takes
    `Gate`, `Hurry` and `End` meanwhile; with `patient` it may wait for a moment in the program's
    steps when copying disturbs it least; with `tell` it sends `Frozen` first.
    """

    stop: bool = False
    patient: bool = False
    tell: bool = False


@dataclass(frozen=True)
class Frozen(Message):
    """What the snapshot will hold does not change any more; it is still being copied."""


@dataclass(frozen=True)
class Hurry(Message):
    """A snapshot that is being taken shall take all the cores it can get. Has no answer."""


@dataclass(frozen=True)
class SnapshotTaken(Message):
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
class Trim(Message):
    """Give back the memory of snapshots before `retained`; answered by `Done` or `Error`."""


@dataclass(frozen=True)
class Adopt(Message):
    """To a prepared worker: take over a newer snapshot, whose tables come with this. Answered by
    `Done` or `Error`, after which the worker is of no use.
    """


@dataclass(frozen=True)
class Replay(Message):
    """Open the gate; answered by `Done` when everything below `until` was executed, or `Error`."""

    until: int


@dataclass(frozen=True)
class End(Message):
    """End the worker; answered by its exit. A snapshot that is being taken is given up."""


@dataclass(frozen=True)
class Ended(Message):
    """Sent by a worker unasked: it met a corrupt log and ends."""

    message: str
