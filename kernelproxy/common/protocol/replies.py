"""What the agent answers to front ends and kernels, and tells them unasked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message


@dataclass(frozen=True)
class StatusReply(Message, kind="StatusReply"):
    """Devices and sessions, each exactly as ``jupyter sing status --json`` shows it.

    Parameters
    ----------
    devices, sessions : list of dict
    sharing : dict
        What has come of the scheduler's decisions; see `Arbiter.sharing`.
    elsewhere : list of str
        A sentence for each GPU of this machine that is another daemon's.
    """

    devices: list[dict[str, Any]]
    sessions: list[dict[str, Any]]
    sharing: dict[str, Any] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Changed(Message, kind="Changed"):
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
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class ActivityReply(Message, kind="ActivityReply"):
    """Who had the devices.

    Parameters
    ----------
    activity : dict
        As `Activity` of ``openapi.yaml``.
    """

    activity: dict[str, Any]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class WhyReply(Message, kind="WhyReply"):
    """Decisions, the oldest first: ``at``, ``session``, ``name``, ``kind`` and ``reason``."""

    decisions: list[dict[str, Any]]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class SessionOpened(Message, kind="SessionOpened"):
    """The id of a new session.

    Parameters
    ----------
    session : str
    form : dict or None
        How its process can be saved: a `kernelproxy.criu.sandbox.Form`; None: it cannot.
    why : str
        Why it cannot, for people.
    """

    session: str
    form: dict[str, Any] | None = None
    why: str = ""
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Attached(Message, kind="Attached"):
    """Comes with four descriptors: log, client page, worker page, agent page."""

    session: str


@dataclass(frozen=True)
class SessionReply(Message, kind="SessionReply"):
    """One session, as in `StatusReply`."""

    session: dict[str, Any]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class PolicyReply(Message, kind="PolicyReply"):
    """The text of the policy that holds; empty if there is none."""

    policy: str
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class PolicyApplied(Message, kind="PolicyApplied"):
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
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointBegun(Message, kind="CheckpointBegun"):
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
class CheckpointReply(Message, kind="CheckpointReply"):
    """One checkpoint, as in `CheckpointsReply`."""

    checkpoint: dict[str, Any]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointsReply(Message, kind="CheckpointsReply"):
    """Checkpoints, the newest first, as ``jupyter sing checkpoints --json`` shows them."""

    checkpoints: list[dict[str, Any]]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Stopped(Message, kind="Stopped"):
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
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointOpened(Message, kind="CheckpointOpened"):
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
        See `kernelproxy.kernel.files.file_bundle.described`.
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
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class RestoreReply(Message, kind="RestoreReply"):
    """What was restored.

    Parameters
    ----------
    outcome : dict
        ``checkpoint`` (its name), ``variables`` and ``files`` (how many), ``aside`` (where those
        files are that were there), ``problems`` (each with ``name`` and ``why``).
    """

    outcome: dict[str, Any]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Wish(Message, kind="Wish"):
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
    withdrawn : bool
        Whether nobody wishes for that any more, unless it has begun.
    """

    verb: str
    name: str
    automatic: bool = False
    form: str = ""
    withdrawn: bool = False
