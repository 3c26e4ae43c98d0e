"""Requests to the agent, of front ends and kernels."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Any

from kernelproxy.common.protocol.base import LARGE_BYTES_MAX, Message

#: What a checkpoint may hold besides the files: variables, or also the process.
FORMS = ("namespace", "process")


@dataclass(frozen=True)
class Status(Message, kind="Status"):
    """Ask for all devices and sessions; answered by `StatusReply`.

    Parameters
    ----------
    session : str
        Id of the session whose own cell asks, else "". The answer waits a little until what that
        cell has issued is executed, and a cell that does nothing but ask does not count as work.
    """

    session: str = ""


@dataclass(frozen=True)
class Watch(Message, kind="Watch"):
    """Ask to be told what changes; answered by `StatusReply`, and then, whenever something has
    changed, by `Changed`. Nothing else can be asked on this connection any more.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name of the one session that matters; "": all.
    """

    session: str = ""


@dataclass(frozen=True)
class Activity(Message, kind="Activity"):
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
class OpenSession(Message, kind="OpenSession"):
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
        See `kernelproxy.agent.checkpoint.auto_checkpoint.Rule`.
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
class CloseSession(Message, kind="CloseSession"):
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
class Attach(Message, kind="Attach"):
    """Sent by the kernel process itself; answered by `Attached` with the descriptors of log,
    client page, worker page and agent page. The connection then belongs to the session: the
    client sends `Bell` on it, and its end is the session's end. If it ended because the daemon
    died, the same process attaches again.
    """

    session: str
    torch_version: str


@dataclass(frozen=True)
class Listen(Message, kind="Listen"):
    """Sent by a notebook's kernel that has not imported torch; answered by `Done`. The connection
    is then like that of `Attach`, without memory: `Wish` and `Leave` come over it, the kernel sends
    `CellsEnded`, and its end is the session's end, unless the same process has attached.
    """

    session: str


@dataclass(frozen=True)
class CellsEnded(Message, kind="CellsEnded"):
    """Sent by a kernel that listens: how many cells it has run so far. Has no answer."""

    count: int


@dataclass(frozen=True)
class CellAsked(Message, kind="CellAsked"):
    """Sent by a kernel in the middle of a cell: its user has run another one. Has no answer."""


@dataclass(frozen=True)
class Suspend(Message, kind="Suspend"):
    """End a session's worker and keep its state; answered by `SessionReply` when it is done."""

    session: str
    reason: str = ""


@dataclass(frozen=True)
class Resume(Message, kind="Resume"):
    """Bring a session back onto its device; answered by `SessionReply` when it is there."""

    session: str


@dataclass(frozen=True)
class Migrate(Message, kind="Migrate"):
    """Move a session to another device while it runs; answered by `SessionReply` when it is
    there. Moving it to where it is already is no error.
    """

    session: str
    device: str


@dataclass(frozen=True)
class Pin(Message, kind="Pin"):
    """Keep a session's memory on its device, or no more; answered by `SessionReply`. Saying it
    twice is no error.
    """

    session: str
    pinned: bool


@dataclass(frozen=True)
class SetPriority(Message, kind="SetPriority"):
    """Let a session be served as one of a level from now on; answered by `SessionReply`.

    Parameters
    ----------
    session : str
    level : str
        One of `kernelproxy.common.scheduler_api.TIERS`.
    """

    session: str
    level: str


@dataclass(frozen=True)
class Checkpoint(Message, kind="Checkpoint"):
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
        See `kernelproxy.agent.checkpoint.catalog.Host`.
    form : str
        ``namespace``: without the process; ``process``: with it, or not at all; "": with it where
        that works.
    """

    session: str
    name: str = ""
    automatic: bool = False
    host: dict[str, Any] | None = None
    form: str = ""
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class Restore(Message, kind="Restore"):
    """Put the notebook of a checkpoint in the place of a session's; answered by `RestoreReply`
    when the kernel has done it, as soon as no cell runs; `Progress` comes while it is read. `form`
    is as in `OpenCheckpoint`.
    """

    session: str
    name: str
    form: str = ""


@dataclass(frozen=True)
class SetAutomatic(Message, kind="SetAutomatic"):
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
class LastCheckpoint(Message, kind="LastCheckpoint"):
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
class Carried(Message, kind="Carried"):
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
    frame_bytes_max = LARGE_BYTES_MAX


@dataclass(frozen=True)
class AwaitCheckpoint(Message, kind="AwaitCheckpoint"):
    """Sent by a kernel: wait until its checkpoint is stored; answered as `Checkpoint`."""

    session: str
    name: str


@dataclass(frozen=True)
class TakeOver(Message, kind="TakeOver"):
    """Sent by a kernel: let the process of a checkpoint take my place; answered by `RestoreReply`
    when that runs. Its present process is ended when it has answered the request that it executes.
    """

    session: str
    name: str


@dataclass(frozen=True)
class Checkpoints(Message, kind="Checkpoints"):
    """Ask for all checkpoints of the user; answered by `CheckpointsReply`."""


@dataclass(frozen=True)
class OpenCheckpoint(Message, kind="OpenCheckpoint"):
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
class DeleteCheckpoint(Message, kind="DeleteCheckpoint"):
    """Forget a checkpoint and give back its space; answered by `Done`."""

    name: str


@dataclass(frozen=True)
class Prepare(Message, kind="Prepare"):
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
class GetPolicy(Message, kind="GetPolicy"):
    """Ask for the policy that holds; answered by `PolicyReply`."""


@dataclass(frozen=True)
class SetPolicy(Message, kind="SetPolicy"):
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
    frame_bytes_max = 1 << 20


@dataclass(frozen=True)
class Stop(Message, kind="Stop"):
    """End the daemon and every session; answered by `Stopped` when all sessions have ended.

    Parameters
    ----------
    checkpoint : bool
        Whether notebooks are saved first; meanwhile `Progress` comes, in notebooks. If who asks
        hangs up before that is done, the daemon goes on.
    """

    checkpoint: bool = False


@dataclass(frozen=True)
class Why(Message, kind="Why"):
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
class Bell(Message, kind="Bell"):
    """Sent by a client: look at my pages. Has no answer."""
