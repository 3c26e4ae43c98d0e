"""Replies and notifications of the agent to front ends and kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message
from kernelproxy.common.protocol.views import (
    ActivityView,
    CheckpointView,
    DecisionView,
    DeviceView,
    DifferenceView,
    RestoreView,
    SessionView,
    SharingView,
)


@dataclass(frozen=True)
class StatusReply(Message, kind="StatusReply"):
    """Devices and sessions, each exactly as in ``jupyter sing status --json``.

    Parameters
    ----------
    devices, sessions : list of dict
    sharing : dict
        Results of the scheduler's decisions; see `Arbiter.sharing`.
    elsewhere : list of str
        A sentence for each GPU of this machine that another daemon owns.
    """

    devices: list[DeviceView]
    sessions: list[SessionView]
    sharing: SharingView = field(default_factory=SharingView)
    elsewhere: list[str] = field(default_factory=list)
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Changed(Message, kind="Changed"):
    """Changes since the `StatusReply`, or since the previous `Changed`.

    Parameters
    ----------
    sessions, devices : list of dict
        Those that have changed or are new, with all fields, as in `StatusReply`.
    gone : list of str
        Ids of sessions that have ended.
    """

    sessions: list[SessionView]
    devices: list[DeviceView]
    gone: list[str]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class ActivityReply(Message, kind="ActivityReply"):
    """History of device use.

    Parameters
    ----------
    activity : dict
        As `Activity` in ``openapi.yaml``.
    """

    activity: ActivityView
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class WhyReply(Message, kind="WhyReply"):
    """Decisions, the oldest first: ``at``, ``session``, ``name``, ``kind`` and ``reason``."""

    decisions: list[DecisionView]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class OpenSessionReply(Message, kind="SessionOpened"):
    """The id of a new session.

    Parameters
    ----------
    session : str
    form : dict or None
        How its process can be saved: a `kernelproxy.criu.sandbox.Form`; None: it cannot.
    why : str
        User-facing reason why it cannot.
    """

    session: str
    form: dict[str, Any] | None = None
    why: str = ""
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Attached(Message, kind="Attached"):
    """Reply to `Attach`, with four descriptors: log, client page, worker page, agent page."""

    session: str


@dataclass(frozen=True)
class SessionReply(Message, kind="SessionReply"):
    """One session, as in `StatusReply`."""

    session: SessionView
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class PolicyReply(Message, kind="PolicyReply"):
    """The text of the current policy; empty if there is none."""

    policy: str
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class PolicyApplied(Message, kind="PolicyApplied"):
    """Effect of another policy, which was applied or tried.

    Parameters
    ----------
    affected : list of dict
        The users and sessions that it affects, and how: each has a sentence ``text``.
    notes : list of str
        Sentences about parts of the policy that have no effect here.
    """

    affected: list[DifferenceView]
    notes: list[str]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointBegun(Message, kind="CheckpointBegun"):
    """Notification that the content of the checkpoint is final, whatever the notebook does.

    Parameters
    ----------
    leaves : bool
        Whether the kernel's process is about to be saved, too. The receiver then closes the
        connection, waits until the kernel has reattached, and sends `AwaitCheckpoint`.
    name : str
        Name of the checkpoint, if `leaves`.
    """

    leaves: bool = False
    name: str = ""


@dataclass(frozen=True)
class CheckpointReply(Message, kind="CheckpointReply"):
    """One checkpoint, as in `CheckpointsReply`."""

    checkpoint: CheckpointView
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointsReply(Message, kind="CheckpointsReply"):
    """Checkpoints, the newest first, as ``jupyter sing checkpoints --json`` shows them."""

    checkpoints: list[CheckpointView]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class StopReply(Message, kind="Stopped"):
    """The daemon and its sessions have ended.

    Parameters
    ----------
    checkpoints : list of str
        Names of the checkpoints that were made before.
    problems : list of str
        One line for each notebook that could not be saved.
    """

    checkpoints: list[str]
    problems: list[str]
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class CheckpointOpened(Message, kind="CheckpointOpened"):
    """A checkpoint that was read; comes with three files.

    They are the concatenated parts of the host state, the device storages, and the concatenated
    content of the notebook's files.

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
        ``namespace``; or ``process``: then there are no parts and no storages; the kernel puts the
        files in place and sends `TakeOver`.
    why : str
        User-facing reason why its process is not restored although the checkpoint has one.
    """

    checkpoint: CheckpointView
    parts: list[int]
    storages: list[list[int]]
    files: list[dict[str, Any]]
    form: str = "namespace"
    why: str = ""
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class RestoreReply(Message, kind="RestoreReply"):
    """Outcome of a restoration.

    Parameters
    ----------
    outcome : dict
        ``checkpoint`` (its name), ``variables`` and ``files`` (how many), ``aside`` (where the
        replaced files were moved), ``problems`` (each with ``name`` and ``why``).
    """

    outcome: RestoreView
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class KernelRequest(Message, kind="Wish"):
    """Request to a kernel, to be carried out between two cells.

    Parameters
    ----------
    verb : str
        ``checkpoint`` or ``restore``.
    name : str
        Name of the checkpoint.
    automatic : bool
        Whether it is automatic, not requested by a user.
    form : str
        As in `Checkpoint` or `OpenCheckpoint`.
    withdrawn : bool
        Whether the request is cancelled. It has no effect if the kernel has begun.
    """

    verb: str
    name: str
    automatic: bool = False
    form: str = ""
    withdrawn: bool = False
