"""Locks on GPUs: a daemon owns a GPU only while it holds the lock on its file in ``/dev``.

The lock is a ``flock(2)``, which works on any open file. This file always exists, only root can
replace it, and a container that has the GPU by a bind mount (as rootless ones always do) has the
same file. Its descriptor is passed on with the daemon's own lock, so that the daemon still owns the
GPU while an agent is replaced; zygotes and workers do not inherit it.

Opening the file keeps the GPU initialised, as a worker does, but makes no CUDA context.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices.device import Device

log = logging.getLogger(__name__)

#: How long to wait for a lock: `owner` holds it only for a moment, and an ending daemon not longer.
WAIT_SECONDS = 1.0
_POLL_SECONDS = 0.05
_LOCKS = Path("/proc/locks")


@dataclass
class Claim:
    """Devices that a daemon owns, with their locks.

    Parameters
    ----------
    devices : list of Device
        Those that no other daemon owns.
    locks : dict of str to int
        Descriptors that hold the locks, by path of the GPU's file.
    elsewhere : list of str
        A sentence for each GPU that another daemon owns.
    """

    devices: list[Device] = field(default_factory=list)
    locks: dict[str, int] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Release the GPUs for other daemons."""
        for fd in self.locks.values():
            os.close(fd)
        self.locks.clear()


def claim(
    devices: Sequence[Device], held: Mapping[str, int] | None = None, seconds: float = WAIT_SECONDS
) -> Claim:
    """Take the locks on GPUs, except those that another daemon owns.

    Parameters
    ----------
    devices : sequence of Device
    held : mapping of str to int, optional
        Descriptors that hold locks already, by path; takes ownership.
    seconds : float
        Total time to wait for locks; a daemon that holds one longer counts as the GPU's owner.

    Raises
    ------
    DeviceError
        If other daemons own all of them; the message names the owners.
    """
    found, spare = Claim(), dict(held or {})
    deadline = time.monotonic() + seconds
    for device in devices:
        if device.node and device.node not in found.locks:
            try:
                lock = spare.pop(device.node, -1)
                lock = _open(device.node) if lock < 0 else lock
            except OSError as error:
                _warn(device, str(error))
            else:
                if not _locked(lock, deadline):
                    found.elsewhere.append(_refusal(device, _holder(lock)))
                    os.close(lock)
                    continue
                found.locks[device.node] = lock
        elif device.kind is DeviceKind.CUDA and not device.node:
            _warn(device, "it has no file of its own")
        found.devices.append(device)
    for fd in spare.values():
        os.close(fd)
    if found.elsewhere and not found.devices:
        raise DeviceError(" ".join(found.elsewhere))
    return found


def owner(device: Device) -> str:
    """Return a text for the daemon that owns a device: ``the daemon of root (pid 12)``; "" if none.

    Raises
    ------
    OSError
        If the file of the GPU cannot be opened or locked.
    """
    if not device.node:
        return ""
    lock = _open(device.node)
    try:
        # Shared, so that another caller of this function does not look like an owner.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(lock)
    finally:
        os.close(lock)
    return ""


def _open(node: str) -> int:
    return os.open(node, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _warn(device: Device, why: str) -> None:
    log.warning("%s cannot be locked (%s): nothing keeps other daemons from it", device.id, why)


def _refusal(device: Device, holder: str) -> str:
    return f"GPU {device.id} ({device.name}) is used by {holder}: use that one, or stop it."


def _locked(lock: int, deadline: float) -> bool:
    """Lock a file; return False if another process still holds it at `deadline`.

    The lock may already be held by this descriptor.
    """
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise DeviceError(f"A GPU cannot be locked: {error}.") from error
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True


def _holder(lock: int) -> str:
    """Describe the holder of the lock on an open file, as far as it is visible here."""
    found = os.fstat(lock)
    pid = pid_of(_LOCKS.read_text(), found)
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:  # it took the lock, and another process inherited it
        return "another daemon"
    return f"the daemon of {_user(uid)} (pid {pid})"


def pid_of(locks: str, found: os.stat_result) -> int:
    """Find the process that took the lock on a file, in the text of ``/proc/locks``.

    Only processes that have an id in this PID namespace are listed.

    Returns
    -------
    int
        Its process id; -1 if it is not listed.
    """
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in locks.splitlines():
        _, kind, _, _, pid, file, *_ = (*line.split(), *[""] * 6)
        if (kind, file) == ("FLOCK", device):
            return int(pid)
    return -1


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
