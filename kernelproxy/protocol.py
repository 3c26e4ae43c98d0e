"""Typed messages between front ends, kernels, agent, zygotes and workers (standard library only).

A message is a frame on a stream socket: ``u32`` length (little-endian), then a JSON object
``{"kind": "OpenSession", ...fields}``. Descriptors travel by ``SCM_RIGHTS`` with the first bytes
of their frame, whose object then also counts them (``"fds": 4``), so that a reader which took
several frames at once knows whose they are. Decoding is strict: unknown kinds and fields, missing
fields and wrong types raise `ProtocolError`; nothing is ever unpickled.
"""

from __future__ import annotations

import array
import json
import os
import secrets
import socket
import struct
import types
import typing
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kernelproxy.errors import ProtocolError

FRAME_BYTES_MAX = 16 << 20
FDS_MAX = 16
_LENGTH = struct.Struct("<I")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)


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


MessageType = type[Message]

_KINDS: dict[str, MessageType] = {each.__name__: each for each in Message.__subclasses__()}
_HINTS = {each: typing.get_type_hints(each) for each in _KINDS.values()}


def encode(message: Message, fd_count: int = 0) -> bytes:
    """Encode a message as a frame.

    Raises
    ------
    ProtocolError
        If the frame would be longer than `FRAME_BYTES_MAX`, or carry too many descriptors.
    """
    body: dict[str, Any] = {"kind": type(message).__name__, **asdict(message)}
    if fd_count:
        body["fds"] = fd_count
    text = json.dumps(body, separators=(",", ":")).encode()
    if len(text) > FRAME_BYTES_MAX or fd_count > FDS_MAX:
        raise ProtocolError(f"A {body['kind']} message is too large to be sent.")
    return _LENGTH.pack(len(text)) + text


def decode(text: bytes) -> tuple[Message, int]:
    """Decode the body of a frame into a message and the number of its descriptors.

    Raises
    ------
    ProtocolError
        If it is anything but a known message with exactly its fields.
    """
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("A message is not JSON.") from error
    if not isinstance(body, dict):
        raise ProtocolError("A message is not a JSON object.")
    kind, fd_count = body.pop("kind", None), body.pop("fds", 0)
    message_type = _KINDS.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise ProtocolError(f"Unknown message {str(kind)[:40]!r}.")
    if type(fd_count) is not int or not 0 <= fd_count <= FDS_MAX:
        raise ProtocolError(f"A {kind} message has a bad number of descriptors.")
    hints = _HINTS[message_type]
    for name, value in body.items():
        if name not in hints:
            raise ProtocolError(f"A {kind} message has an unknown field {name[:40]!r}.")
        if not _has_type(value, hints[name]):
            raise ProtocolError(f"Field {name!r} of a {kind} message has the wrong type.")
    try:
        return message_type(**body), fd_count
    except TypeError as error:
        raise ProtocolError(f"A {kind} message lacks a field.") from error


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which are no JSON and which no field means."""
    raise ValueError(name)


def _has_type(value: object, hint: Any) -> bool:
    """Whether a JSON value is of a field's declared type; integers count as floats."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_has_type(value, each) for each in typing.get_args(hint))
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_has_type(each, item) for each in value)
    if origin is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, float) or type(value) is int
    return type(value) is hint


@dataclass
class FrameDecoder:
    """Cuts a byte stream into messages and gives each its descriptors.

    Descriptors that were received and not handed out are owned, and closed by `close`.
    """

    _bytes: bytearray = field(default_factory=bytearray)
    _fds: deque[int] = field(default_factory=deque)

    def feed(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Take what one ``recvmsg`` returned."""
        self._bytes += data
        self._fds.extend(fds)

    def next_message(self) -> tuple[Message, list[int]] | None:
        """Return the next whole message with its descriptors, which become the caller's.

        Raises
        ------
        ProtocolError
            If the stream is not made of messages; it cannot be read on.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > FRAME_BYTES_MAX:
            raise ProtocolError("A message is too large.")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            if len(self._fds) > FDS_MAX:
                raise ProtocolError("Descriptors came that no message asked for.")
            return None
        message, fd_count = decode(bytes(self._bytes[_LENGTH.size : end]))
        del self._bytes[:end]
        if fd_count > len(self._fds) or (not self._bytes and fd_count < len(self._fds)):
            raise ProtocolError("A message came with the wrong number of descriptors.")
        return message, [self._fds.popleft() for _ in range(fd_count)]

    def missing(self) -> int:
        """Bytes that the message which has begun still lacks; 0 before its length is known."""
        if len(self._bytes) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._bytes)
        return _LENGTH.size + int(length) - len(self._bytes)

    def close(self) -> None:
        """Close descriptors that no message claimed."""
        while self._fds:
            os.close(self._fds.popleft())


def receive_bytes(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and the descriptors that came with them (close-on-exec).

    Raises
    ------
    ProtocolError
        If more descriptors came than any message may carry.
    """
    data, ancillary, flags, _ = sock.recvmsg(size, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise ProtocolError("Too many descriptors came with a message.")
    return data, list(fds)


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message over a blocking socket; the descriptors stay the caller's.

    Raises
    ------
    OSError
        If the peer is gone (``BrokenPipeError``) or the socket's timeout passed.
    """
    frame = encode(message, len(fds))
    sent = socket.send_fds(sock, [frame], list(fds)) if fds else 0
    sock.sendall(frame[sent:])


def recv_message(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message over a blocking socket; its descriptors become the caller's.

    Raises
    ------
    ConnectionError
        If the peer closed the connection.
    ProtocolError
        If what came is no message.
    TimeoutError
        If the socket's timeout passed.
    """
    decoder = FrameDecoder()
    try:
        wanted = _LENGTH.size  # never beyond this frame: the rest is the next call's
        while True:
            while wanted:
                data, fds = receive_bytes(sock, min(wanted, 1 << 16))
                if not data:
                    raise ConnectionError("The other side closed the connection.")
                decoder.feed(data, fds)
                wanted -= len(data)
            found = decoder.next_message()
            if found is not None:
                return found
            wanted = decoder.missing()
    finally:
        decoder.close()
