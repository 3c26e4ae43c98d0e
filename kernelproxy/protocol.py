"""Typed messages between front ends, kernels, agent, zygotes and workers (standard library only).

`kernelproxy.frames` puts them on a stream socket.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Any

#: What a checkpoint may hold besides the files: variables, or also the process.
FORMS = ("namespace", "process")


@dataclass(frozen=True)
class Message:
    """Base of all messages."""


# Requests to the agent.


@dataclass(frozen=True)
class Status(Message):
    """Ask for all devices and sessions; answered by `StatusReply`."""


@dataclass(frozen=True)
class Watch(Message):
    """Ask to be told what changes; answered by `StatusReply`, and then, whenever something has
    changed, by `Changed`. Nothing else can be asked on this connection any more.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name of the one session that matters; "": all.
    """

    session: str = ""


@dataclass(frozen=True)
class Activity(Message):
    """Ask who had the devices; answered by `ActivityReply`.

    Parameters
    ----------
    since : float
        Seconds of the epoch.
    resolution : float
        Seconds: what is closer together is one.
    """

    since: float
    resolution: float = 1.0


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
    hibernate_timeout : float
        Seconds without use after which it goes to disk, with its process where that can be saved;
        0 or less: never.
    notebook : str
        Path of the notebook, or "".
    checkpoint_every, checkpoint_cells, checkpoint_keep : float, int, int
        See `kernelproxy.agent.automatic.Rule`.
    user : str
        Who it is for, as policies call them; believed from the daemon's own user and from root.
        "": the system's name of who asks.
    key : str
        Made up by who asks: the same request, made again, opens no second session.
    home : str
        Home directory of who asks, for the processes that the system daemon starts as him.
    """

    name: str
    kernel_id: str
    python: str
    idle_timeout: float | None = None
    device: str | None = None
    script: bool = False
    hibernate_timeout: float = 0.0
    notebook: str = ""
    checkpoint_every: float = 0.0
    checkpoint_cells: int = 0
    checkpoint_keep: int = 3
    user: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    home: str = field(default_factory=lambda: os.path.expanduser("~"))


@dataclass(frozen=True)
class CloseSession(Message):
    """End a session and free all it has; answered by `Done`, also if it is gone already.

    Parameters
    ----------
    session : str
    died : bool
        Whether its kernel ended though nobody wanted it to.
    """

    session: str
    died: bool = False


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
class Listen(Message):
    """Sent by a notebook's kernel that has not imported torch; answered by `Done`. The connection
    is then like that of `Attach`, without memory: `Wish` and `Leave` come over it, the kernel sends
    `CellsEnded`, and its end is the session's end, unless the same process has attached.
    """

    session: str


@dataclass(frozen=True)
class CellsEnded(Message):
    """Sent by a kernel that listens: how many cells it has run so far. Has no answer."""

    count: int


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
class Pin(Message):
    """Keep a session's memory on its device, or no more; answered by `SessionReply`. Saying it
    twice is no error.
    """

    session: str
    pinned: bool


@dataclass(frozen=True)
class SetPriority(Message):
    """Let a session be served as one of a level from now on; answered by `SessionReply`.

    Parameters
    ----------
    session : str
    level : str
        One of `kernelproxy.agent.arbiter.TIERS`.
    """

    session: str
    level: str


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
    form : str
        ``namespace``: without the process; ``process``: with it, or not at all; "": with it where
        that works.
    """

    session: str
    name: str = ""
    automatic: bool = False
    host: dict[str, Any] | None = None
    form: str = ""


@dataclass(frozen=True)
class Restore(Message):
    """Put the notebook of a checkpoint in the place of a session's; answered by `RestoreReply`
    when the kernel has done it, as soon as no cell runs; `Progress` comes while it is read. `form`
    is as in `OpenCheckpoint`.
    """

    session: str
    name: str
    form: str = ""


@dataclass(frozen=True)
class SetAutomatic(Message):
    """Make checkpoints by themselves, or not, until the kernel ends; answered by `SessionReply`.

    Parameters
    ----------
    session : str
    every : float
        Seconds between two of them; 0: time is no reason.
    cells : int
        Cells between two of them; 0: cells are no reason.
    """

    session: str
    every: float
    cells: int


@dataclass(frozen=True)
class LastCheckpoint(Message):
    """Ask for the checkpoint that gives a session's notebook back; answered by `CheckpointReply`.

    That is the newest of the notebook; but while a session has restored nothing and none of it was
    asked for, the newest that an earlier kernel left which died.

    Parameters
    ----------
    session : str
    kernel_id, notebook : str
        Of a kernel that has ended, as in `OpenSession`: its session may be gone, and what is asked
        for is the newest of its notebook. Otherwise "".
    """

    session: str
    kernel_id: str = ""
    notebook: str = ""


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
class AwaitCheckpoint(Message):
    """Sent by a kernel: wait until its checkpoint is stored; answered as `Checkpoint`."""

    session: str
    name: str


@dataclass(frozen=True)
class TakeOver(Message):
    """Sent by a kernel: let the process of a checkpoint take my place; answered by `RestoreReply`
    when that runs. Its present process is ended when it has answered the request that it executes.
    """

    session: str
    name: str


@dataclass(frozen=True)
class Checkpoints(Message):
    """Ask for all checkpoints of the user; answered by `CheckpointsReply`."""


@dataclass(frozen=True)
class OpenCheckpoint(Message):
    """Read a checkpoint; answered by `CheckpointOpened` when all of it was read and verified, and
    by `Progress` until then.

    Parameters
    ----------
    name : str
    session : str
        Where it is to be restored, "" if that has none.
    form : str
        ``namespace``; ``process``, upon which it is refused where its process cannot be restored;
        "": its process where that works.
    """

    name: str
    session: str = ""
    form: str = ""


@dataclass(frozen=True)
class DeleteCheckpoint(Message):
    """Forget a checkpoint and give back its space; answered by `Done`."""

    name: str


@dataclass(frozen=True)
class Prepare(Message):
    """Start what sessions of an interpreter will need; answered by `Done` at once.

    Parameters
    ----------
    python : str
    home : str
        As in `OpenSession`.
    """

    python: str
    home: str = field(default_factory=lambda: os.path.expanduser("~"))


@dataclass(frozen=True)
class GetPolicy(Message):
    """Ask for the policy that holds; answered by `PolicyReply`."""


@dataclass(frozen=True)
class SetPolicy(Message):
    """Let another policy hold; answered by `PolicyApplied`. For the daemon's own user and for root.

    Parameters
    ----------
    policy : str
        Its text.
    dry : bool
        Only say whom it would affect.
    """

    policy: str
    dry: bool = False


@dataclass(frozen=True)
class Stop(Message):
    """End the daemon and every session; answered by `Stopped` when all sessions have ended.

    Parameters
    ----------
    checkpoint : bool
        Whether notebooks are put away first; meanwhile `Progress` comes, in notebooks. If who asks
        hangs up before that is done, the daemon goes on.
    """

    checkpoint: bool = False


@dataclass(frozen=True)
class Why(Message):
    """Ask what was decided about a session, at most so many times; answered by `WhyReply`.

    Parameters
    ----------
    session : str
        Also one that has ended, if the daemon is of who asks alone, or who asks is root.
    count : int
    """

    session: str
    count: int


@dataclass(frozen=True)
class Bell(Message):
    """Sent by a client: look at my pages. Has no answer."""


# Replies of the agent.


@dataclass(frozen=True)
class StatusReply(Message):
    """Devices and sessions, each exactly as ``jupyter sing status --json`` shows it.

    Parameters
    ----------
    devices, sessions : list of dict
    sharing : dict
        What has come of the scheduler's decisions; see `Arbiter.sharing`.
    """

    devices: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    sharing: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Changed(Message):
    """What has changed since the `StatusReply`, or the last one of these.

    Parameters
    ----------
    sessions, devices : list of dict
        Those that have changed or are new, whole, as in `StatusReply`.
    gone : list of str
        Ids of sessions that have ended.
    """

    sessions: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    gone: list[str]


@dataclass(frozen=True)
class ActivityReply(Message):
    """Who had the devices.

    Parameters
    ----------
    activity : dict
        As `Activity` of ``openapi.yaml``.
    """

    activity: dict[str, Any]


@dataclass(frozen=True)
class WhyReply(Message):
    """Decisions, the oldest first: ``at``, ``session``, ``name``, ``kind`` and ``reason``."""

    decisions: list[dict[str, Any]]


@dataclass(frozen=True)
class SessionOpened(Message):
    """The id of a new session.

    Parameters
    ----------
    session : str
    form : dict or None
        How its process can be saved: a `kernelproxy.process.form.Form`; None: it cannot.
    why : str
        Why it cannot, for people.
    """

    session: str
    form: dict[str, Any] | None = None
    why: str = ""


@dataclass(frozen=True)
class Attached(Message):
    """Comes with four descriptors: log, client page, worker page, agent page."""

    session: str


@dataclass(frozen=True)
class SessionReply(Message):
    """One session, as in `StatusReply`."""

    session: dict[str, Any]


@dataclass(frozen=True)
class PolicyReply(Message):
    """The text of the policy that holds; empty if there is none."""

    policy: str


@dataclass(frozen=True)
class PolicyApplied(Message):
    """Another policy holds, or would.

    Parameters
    ----------
    affected : list of dict
        Whom that affects, and how: each has a sentence ``text``.
    notes : list of str
        Sentences on what of it means nothing here.
    """

    affected: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class CheckpointBegun(Message):
    """What the checkpoint holds does not change any more, whatever the notebook does.

    Parameters
    ----------
    leaves : bool
        Whether the kernel's process is about to be saved, too: whoever receives this closes the
        connection, waits until the kernel has joined again, and asks by `AwaitCheckpoint`.
    name : str
        Of the checkpoint, if the kernel leaves.
    """

    leaves: bool = False
    name: str = ""


@dataclass(frozen=True)
class CheckpointReply(Message):
    """One checkpoint, as in `CheckpointsReply`."""

    checkpoint: dict[str, Any]


@dataclass(frozen=True)
class CheckpointsReply(Message):
    """Checkpoints, the newest first, as ``jupyter sing checkpoints --json`` shows them."""

    checkpoints: list[dict[str, Any]]


@dataclass(frozen=True)
class Stopped(Message):
    """The daemon and its sessions have ended.

    Parameters
    ----------
    checkpoints : list of str
        Names of those that were made before.
    problems : list of str
        One line for each notebook of which none could be made.
    """

    checkpoints: list[str]
    problems: list[str]


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
    form : str
        ``namespace``; or ``process``: then there are no parts and no storages, and the kernel puts
        the files in place and asks by `TakeOver`.
    why : str
        Why it is not the process though it has one, for people.
    """

    checkpoint: dict[str, Any]
    parts: list[int]
    storages: list[list[int]]
    files: list[dict[str, Any]]
    form: str = "namespace"
    why: str = ""


@dataclass(frozen=True)
class Progress(Message):
    """Bytes, or notebooks, done and in total; any number of these may come before another reply."""

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
    form : str
        As in `Checkpoint` or `OpenCheckpoint`.
    """

    verb: str
    name: str
    automatic: bool = False
    form: str = ""


# Between the agent and a kernel's tender, which has its process: see `kernelproxy.process`.


@dataclass(frozen=True)
class Tend(Message):
    """Sent by the tender of a kernel, once per connection, which from then on carries orders.

    Answered by `Done`; the agent sends `Hold`, `LetThrough`, `Dump`, `Revive`, `Promise` and
    `Replace`, one at a time, each of which is answered.

    Parameters
    ----------
    session : str
    """

    session: str


@dataclass(frozen=True)
class Hold(Message):
    """Order: let no request through to the kernel; answered by `Done` when it has dealt with those
    before, and by `Error` (``busy``, and requests go through again) if it has not in time.

    Parameters
    ----------
    seconds : float
    """

    seconds: float


@dataclass(frozen=True)
class LetThrough(Message):
    """Order: let requests through again; answered by `Done`."""


@dataclass(frozen=True)
class Dump(Message):
    """Order: save the kernel's process; answered by `Dumped`. If that fails, the process goes on.

    Parameters
    ----------
    directory : str
        Empty, for the images.
    wake_fd : int
        See `Left`.
    leave_running : bool
        Whether the process goes on; else it is gone.
    """

    directory: str
    wake_fd: int
    leave_running: bool


@dataclass(frozen=True)
class Dumped(Message):
    """The images are there.

    Parameters
    ----------
    seconds : float
        How long the process stood still.
    """

    seconds: float


@dataclass(frozen=True)
class Revive(Message):
    """Order: make a process of images; answered by `Revived`.

    Parameters
    ----------
    directory : str
        Stays as it is.
    session : str
        The session that the process joins.
    beside : bool
        Whether the kernel's present process stays till `Replace`, or there is none.
    """

    directory: str
    session: str
    beside: bool


@dataclass(frozen=True)
class Revived(Message):
    """The process runs.

    Parameters
    ----------
    pid : int
        As the agent sees it.
    """

    pid: int


@dataclass(frozen=True)
class Promise(Message):
    """Order: carry out `Replace` also if the connection ends before it comes: the kernel is about
    to hear that it is replaced, and executes nothing from then on. Answered by `Done`.
    """


@dataclass(frozen=True)
class Replace(Message):
    """Order: let the revived process take the place of the present one, as soon as the request that
    this executes is answered; what it has not begun is asked of the new one. Answered by `Done`.
    """


@dataclass(frozen=True)
class Knock(Message):
    """Sent by a tender unasked: a request waits for a kernel that hibernates."""


@dataclass(frozen=True)
class Leave(Message):
    """Sent to a kernel: give up the session's memory and this connection, for a while. Answered by
    `Left`, and by `Error` if it cannot.
    """


@dataclass(frozen=True)
class Left(Message):
    """The last that comes over this connection. The kernel joins again when it is woken.

    Parameters
    ----------
    wake_fd : int
        Number, in the kernel, of a pipe's writing end: a line of JSON is awaited there, see
        `kernelproxy.activation.link`.
    """

    wake_fd: int


@dataclass(frozen=True)
class Stay(Message):
    """Sent to a kernel that was told by `CheckpointBegun` that it is going to leave: it does not
    leave after all. Has no answer.
    """


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
        ``unavailable``, ``bad-request``, ``bad-policy``, ``stopping``, ``failed``, or that of a
        `StoreError`; of the attendant also ``unknown-kernel``, ``has-server``; made by `control`:
        ``no-daemon``, ``timeout``.
    """

    message: str
    reason: str


# Between a server and the attendant, which has its kernels: see `kernelproxy.attendant`. Each
# connection is one kernel's, and its end without `CloseKernel` says that the server has left.


@dataclass(frozen=True)
class StartKernel(Message):
    """Start a kernel; answered by `KernelState`. Two descriptors come with it: its standard output
    and error.

    Parameters
    ----------
    kernel_id : str
        Jupyter's.
    command : list of str
    env : dict
        All of its environment.
    cwd : str
    keep : float
        Seconds for which it lives while it has no server.
    session : str
        Id of its session, or "".
    tended : dict or None
        The arguments of `kernelproxy.process.tender.Tender`, if its process is to be one that can
        be saved.
    """

    kernel_id: str
    command: list[str]
    env: dict[str, str]
    cwd: str
    keep: float
    session: str
    tended: dict[str, Any] | None = None


@dataclass(frozen=True)
class AdoptKernel(Message):
    """Take over a kernel whose server has left; answered by `KernelState`.

    Parameters
    ----------
    kernel_id : str
    keep : float
        As for `StartKernel`.
    wait : float
        Seconds for its server to have left: one that was just killed may not have been missed yet.
    """

    kernel_id: str
    keep: float
    wait: float = 0.0


@dataclass(frozen=True)
class AskKernel(Message):
    """Ask how the connection's kernel is; answered by `KernelState`."""


@dataclass(frozen=True)
class SignalKernel(Message):
    """Send the connection's kernel a signal. Has no answer.

    Parameters
    ----------
    number : int
    """

    number: int


@dataclass(frozen=True)
class ShutDownKernel(Message):
    """The connection's kernel was asked to end, see `Tender.shut_down`. Has no answer."""


@dataclass(frozen=True)
class CloseKernel(Message):
    """End the connection's kernel, and free what it has; answered by `KernelState`."""


@dataclass(frozen=True)
class KernelState(Message):
    """How a kernel is; also sent unasked, once, when it has ended.

    Parameters
    ----------
    pid : int
        Its process; 0: it hibernates.
    session : str
        Id of its session: another one after its process was replaced.
    code : int or None
        How it has ended, as `subprocess.Popen.poll` says it; None: it has not.
    """

    pid: int
    session: str
    code: int | None


@dataclass(frozen=True)
class EndKernels(Message):
    """End all kernels that have no server; answered by `Done` when that is done."""


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
        Whether its gate is open; not with `prepare`. It has no `Lease` yet.
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
class Lease(Message):
    """Give or take the permission to execute, which is needed beside an open gate.

    Has no answer, and may come at any time: a worker without a lease sends `Parked` when nothing
    is executed any more. A token below one that it has seen is stale, and changes nothing. If the
    program's memory is least within so many seconds, the lease is taken there; otherwise then.
    """

    token: int
    given: bool
    within: float = 0.0


@dataclass(frozen=True)
class Parked(Message):
    """Since the lease with this token was taken nothing is executed any more."""

    token: int


@dataclass(frozen=True)
class Observe(Message):
    """Answered by `Observed`, at any time: the step that the log repeats.

    `since_ns`, of the monotonic clock, says from when on steps are counted.
    """

    since_ns: int


@dataclass(frozen=True)
class Observed(Message):
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
