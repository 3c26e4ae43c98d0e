"""Memory that ranks of a host share, so that what one gives to others is not sent through sockets.

Note [Outboxes]: each process has one outbox, a memfd in which it puts its contributions. A frame to
a rank of the same host then names a part of it. The receiver reads that part in place, through a
mapping that it cannot write to, and sets the frame's byte among the acknowledgements at the start
of the file when it needs the part no more. The memory is used again when the contribution is gone
here, and all its frames are acknowledged or were for ranks whose processes have ended.

A contribution that does not fit is ordinary memory, and goes through the socket.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Protocol

import torch

#: Smaller contributions go through the socket: the header would take as long.
SHARED_BYTES_MIN = (32 << 10) + 1
OUTBOX_BYTES = 256 << 20
#: 0: no outboxes, all contributions go through the sockets. Without root's rights, processes that
#: share memory cannot be saved.
OUTBOX_VARIABLE = "SING_OUTBOX"
#: Acknowledgements at the start of the file, one byte each, and as many frames at a time.
ACKNOWLEDGEMENTS = 1 << 16


class Receiver(Protocol):
    """The process of a peer."""

    lost: bool


@dataclass
class _Region:
    """A part of the outbox, for one contribution at a time."""

    offset: int
    size: int
    held: bool = True
    """The contribution exists in this process."""
    frames: list[tuple[Receiver, int]] = field(default_factory=list)
    """Receivers of its parts, and where they acknowledge them."""


@dataclass(frozen=True)
class OutboxPlace:
    """OutboxPlace of a frame's content, and of its acknowledgement, in the sender's outbox.

    Parameters
    ----------
    offset : int
        In bytes from the start of the outbox.
    acknowledgement : int
        Which one.
    """

    offset: int
    acknowledgement: int


class Outbox:
    """The contributions of this process.

    Parameters
    ----------
    size : int
        Most bytes that it has; memory is taken as it is used, and kept.
    """

    def __init__(self, size: int = OUTBOX_BYTES) -> None:
        #: Its file; negative: it is closed, or the process may not have files of this size.
        self.fd = _new_file(ACKNOWLEDGEMENTS + size)
        self._memory = mmap.mmap(self.fd, ACKNOWLEDGEMENTS + size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = ACKNOWLEDGEMENTS + size
        self._lock = threading.Lock()
        self._regions: dict[int, _Region] = {}
        self._used = ACKNOWLEDGEMENTS
        self._free: list[int] = []
        self._unused = iter(range(ACKNOWLEDGEMENTS))

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor without values, in the outbox if there is room."""
        size = count * dtype.itemsize
        region = None if size < SHARED_BYTES_MIN else self._take(size)
        if region is None:
            return torch.empty(count, dtype=dtype)
        memory = (ctypes.c_ubyte * size).from_buffer(self._memory, region.offset)
        # Called from any thread, at any time: it may only do what cannot be interrupted.
        weakref.finalize(memory, setattr, region, "held", False).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def _take(self, size: int) -> _Region | None:
        with self._lock:
            if self.fd < 0:
                return None
            fits = [each for each in self._regions.values() if size <= each.size <= 2 * size]
            for region in sorted(fits, key=lambda each: each.size):
                if self._is_free(region):
                    region.held = True
                    return region
            rounded = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
            if self._used + rounded > self._end:
                return self._join(rounded)
            region = self._regions[self._used] = _Region(self._used, rounded)
            self._used += rounded
            return region

    def _is_free(self, region: _Region) -> bool:
        if region.held:
            return False
        left = []
        for receiver, number in region.frames:
            if self._memory[number] or receiver.lost:
                self._free.append(number)
            else:
                left.append((receiver, number))
        region.frames = left
        return not left

    def _join(self, size: int) -> _Region | None:
        """Make one region of free neighbours, as no other one has the size."""
        first: _Region | None = None
        for offset in sorted(self._regions):
            region = self._regions[offset]
            if not self._is_free(region):
                first = None
            elif first is None:
                first = region
            else:
                first.size += region.size
                del self._regions[offset]
            if first is not None and first.size >= size:
                first.held = True
                return first
        return None

    def give(self, content: torch.Tensor, receiver: Receiver) -> OutboxPlace | None:
        """Let a receiver read a contiguous tensor; None: it is not in the outbox."""
        offset = content.data_ptr() - self._base
        if not ACKNOWLEDGEMENTS <= offset < self._end or content.nbytes < SHARED_BYTES_MIN:
            return None
        with self._lock:
            for region in self._regions.values() if self.fd >= 0 else ():
                if region.offset <= offset < region.offset + region.size:
                    number = self._free.pop() if self._free else next(self._unused, None)
                    if number is None:
                        return None
                    self._memory[number] = 0
                    region.frames.append((receiver, number))
                    return OutboxPlace(offset, number)
        return None

    def close(self) -> None:
        """Close the file; contributions keep their memory. Idempotent."""
        with self._lock:
            self.abandon()

    def abandon(self) -> None:
        """Do that in a forked child, where a thread that does not exist may hold the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._memory = mmap.mmap(-1, ACKNOWLEDGEMENTS)  # it has a descriptor, too


def _new_file(size: int) -> int:
    if os.environ.get(OUTBOX_VARIABLE) == "0":
        return -1
    fd = os.memfd_create("sing-outbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        return -1
    # A receiver that reads beyond its end would be killed.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


class SharedMemory:
    """The outbox of a peer, as this process sees it.

    Parameters
    ----------
    fd : int
        Its file, which is closed.

    Raises
    ------
    OSError, ValueError
        It is not an outbox.
    """

    def __init__(self, fd: int) -> None:
        self._process = os.getpid()
        try:
            self._size = os.fstat(fd).st_size
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if self._size <= ACKNOWLEDGEMENTS or not sealed:
                raise ValueError("it is no outbox of a rank")
            self._content = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)
            self._acknowledgements = mmap.mmap(fd, ACKNOWLEDGEMENTS)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no thread writes to it
            self._base = torch.frombuffer(self._content, dtype=torch.uint8).data_ptr()

    def take(self, place: OutboxPlace, length: int) -> torch.Tensor:
        """Return the bytes at a place, to be read only; they are acknowledged when it is gone.

        Raises
        ------
        ValueError
            The place is outside.
        """
        first, number = place.offset, place.acknowledgement
        inside = ACKNOWLEDGEMENTS <= first <= self._size - length and number < ACKNOWLEDGEMENTS
        if not inside or length <= 0:
            raise ValueError("a rank names memory that it does not have")
        memory = (ctypes.c_ubyte * length).from_address(self._base + first)
        # It keeps the mappings.
        acknowledge = weakref.finalize(memory, _acknowledge, self, number)
        acknowledge.atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def acknowledge(self, number: int) -> None:
        # A forked child drops its copies of frames that this process still reads.
        if os.getpid() == self._process:
            self._acknowledgements[number] = 1


def _acknowledge(memory: SharedMemory, number: int) -> None:
    memory.acknowledge(number)
