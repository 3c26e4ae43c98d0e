"""The exceptions of this package.

SingError                  base of all user-facing errors of this package
├── ControlError           the daemon refused a request, or cannot be reached
├── DeviceError            the configured devices are invalid or missing
├── FileError              a notebook's file cannot be read in a consistent state
├── NativeError            the native part is not available for an environment
├── ProcessError           a kernel's process cannot be saved or restored
├── ProtocolError          a peer sent something that is not a message
├── StoreError             the chunk store cannot store or return a snapshot
├── WorkerError            a worker or a zygote died, hung, or rejected a command
└── InternalError          an invariant is broken: a bug in this package
"""

from __future__ import annotations

from typing import Literal

#: Reasons of a `StoreError`.
StoreReason = Literal[
    "busy",  # the lock is held
    "cancelled",
    "damaged",  # a chunk or a manifest
    "failed",
    "full",  # the disk
    "missing",  # a chunk
    "name",  # not allowed for a manifest
    "newer",  # a manifest's version
    "permission",
    "quota",
    "torch",  # another version of torch
    "unavailable",  # a package is missing
    "unknown",  # no such manifest
]
#: Reasons of a `ProcessError`.
ProcessReason = Literal[
    "dump",
    "restore",
    "timeout",
    "unavailable",  # not on this machine
]
#: Why a request failed, one word for programs: in messages, REST replies and ``--json``. The words
#: never change. A type checker compares all places that name one; a newer peer may send others.
Reason = Literal[
    StoreReason,
    ProcessReason,
    "already-attached",  # the session has a kernel
    "ambiguous",  # a name fits several sessions or checkpoints
    "bad-policy",
    "bad-request",
    "bad-workload",  # of the simulator
    "broken",  # the connection to the kernel host
    "cannot-simulate",
    "ended",  # the session or its kernel
    "has-server",  # another server has the kernel
    "no-daemon",
    "no-room",  # on the device
    "not-allowed",
    "stopping",  # the daemon
    "too-many",  # requests or connections of a user
    "unknown-checkpoint",
    "unknown-device",
    "unknown-kernel",
    "unknown-owner",  # of a path: a user that this namespace does not have
    "unknown-session",
    "unsafe-directory",  # others may write to it
]


class SingError(Exception):
    """Base of all errors of this package; its text is one user-facing sentence."""

    #: True if the same request may succeed later without manual repair.
    recoverable = False


class ControlError(SingError):
    """Raised if the daemon refuses a request, or cannot be reached.

    Parameters
    ----------
    message : str
        One user-facing sentence.
    reason : Reason
        One word for programs.
    """

    def __init__(self, message: str, reason: Reason = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.recoverable = reason in ("no-daemon", "no-room", "timeout")


class DeviceError(SingError):
    """Raised if the configured devices are invalid or missing."""


class FileError(SingError):
    """Raised if one file of a notebook cannot be read in a consistent state; others still can."""

    recoverable = True


class NativeError(SingError):
    """Raised if the native part is not available for an environment."""


class ProcessError(SingError):
    """Raised if a kernel's process cannot be saved or restored.

    A process that could not be saved continues to run.

    Parameters
    ----------
    message : str
        One user-facing sentence.
    reason : ProcessReason
        One word for programs.
    """

    def __init__(self, message: str, reason: ProcessReason) -> None:
        super().__init__(message)
        self.reason = reason
        self.recoverable = reason in ("dump", "timeout")


class ProtocolError(SingError):
    """Raised if a peer sent something that is not a message."""


class StoreError(SingError):
    """Raised if the chunk store cannot store or return a snapshot; the store is unchanged.

    Parameters
    ----------
    message : str
        One user-facing sentence.
    reason : StoreReason
        One word for programs.
    """

    def __init__(self, message: str, reason: StoreReason = "failed") -> None:
        super().__init__(message)
        self.reason = reason
        self.recoverable = reason in ("full", "quota", "busy", "cancelled")


class WorkerError(SingError):
    """Raised if a worker or a zygote died, hung, or rejected a command."""

    recoverable = True


class WorkerDiedError(WorkerError):
    """Raised if a worker died during a command; it may succeed in another worker."""


class DeviceFullError(WorkerError):
    """Raised if a worker cannot start because its device has too little free memory."""


class InternalError(SingError):
    """Raised if an invariant is broken: a bug in this package."""
