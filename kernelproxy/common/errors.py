"""The exceptions of this package.

SingError                  anything of ours that a person should read
├── ControlError           the daemon refused a request, or cannot be reached
├── DeviceError            the configured devices make no sense, or are not there
├── FileError              a file of a notebook cannot be read as it is at one moment
├── NativeError            the native part is not available for an environment
├── ProcessError           a kernel's process cannot be saved, or made again
├── ProtocolError          a peer sent what is not a message
├── StoreError             the chunk store cannot keep a snapshot, or give it back
├── WorkerError            a worker or a zygote died, hung, or refused an order
└── InternalError          an invariant is broken: our bug
"""

from __future__ import annotations


class SingError(Exception):
    """Base of all our errors; its text is one sentence for people."""

    #: Whether the same request may succeed later without anything being repaired by hand.
    recoverable = False


class ControlError(SingError):
    """The daemon refused a request, or cannot be reached.

    Parameters
    ----------
    message : str
        One sentence for people.
    reason : str
        One lower-case word for programs, such as ``unknown-session``; see `protocol.Error`.
    """

    def __init__(self, message: str, reason: str = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.recoverable = reason in ("no-daemon", "no-room", "timeout")


class DeviceError(SingError):
    """The configured devices make no sense, or are not there."""


class FileError(SingError):
    """A file of a notebook cannot be read as it is at one moment; the rest of them can."""

    recoverable = True


class NativeError(SingError):
    """The native part is not available for an environment."""


class ProcessError(SingError):
    """A kernel's process cannot be saved, or made again; one that was to be saved goes on.

    Parameters
    ----------
    message : str
        One sentence for people.
    reason : str
        One word for programs: ``unavailable`` (not on this machine), ``dump``, ``restore``,
        ``timeout``.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.recoverable = reason in ("dump", "timeout")


class ProtocolError(SingError):
    """A peer sent what is not a message."""


class StoreError(SingError):
    """The chunk store cannot keep a snapshot, or give it back; nothing in it has changed.

    Parameters
    ----------
    message : str
        One sentence for people.
    reason : str
        One word for programs: ``full``, ``quota``, ``permission``, ``busy`` (the lock is held),
        ``cancelled``, ``unknown`` (no such manifest), ``name``, ``missing`` or ``damaged`` (a
        chunk or a manifest), ``newer`` (a manifest's version), ``torch`` (another version of
        it), ``unavailable`` (a package is missing), ``failed``.
    """

    def __init__(self, message: str, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason
        self.recoverable = reason in ("full", "quota", "busy", "cancelled")


class WorkerError(SingError):
    """A worker or a zygote died, hung, or refused an order."""

    recoverable = True


class WorkerDiedError(WorkerError):
    """A worker died in the middle of an order; another one may do better."""


class InternalError(SingError):
    """An invariant is broken: our bug."""
