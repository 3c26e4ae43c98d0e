"""A device session's shared memory, accessed from Python.

`native/oplog/layout.h` defines the pages and their writers; a test checks that the offsets here are
equal to those there. Words are read and written through casted memory views, with one aligned load
or store each. Python has no fences: where the order of a store and a later load matters, a futex
call stands between them (`AgentPage.ring`), whose entry is a full barrier.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
from collections.abc import Sequence
from enum import IntEnum
from typing import overload

from kernelproxy.common.errors import InternalError

MAGIC = 0x31474E4953594A31
LAYOUT_VERSION = 2
PAGE_BYTES = 4096
ANSWER_RING_BYTES = 4 << 20

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, which demands FALLOC_FL_KEEP_SIZE
_FUTEX_WAKE, _ALL_WAITERS = 1, 0x7FFFFFFF
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Presence(IntEnum):
    """State of a session's worker, for the client."""

    ABSENT = 0
    PRESENT = 1
    ENDED = 2


class DeviceKind(IntEnum):
    """Kind of a device: CPU threads or a GPU."""

    SOFTWARE = 0
    CUDA = 1


class Word:
    """One shared word of a page: an attribute whose value lies in shared memory.

    Parameters
    ----------
    offset : int
        Its place in the page, in bytes.
    size : int
        4 or 8 bytes.
    """

    def __init__(self, offset: int, size: int = 8) -> None:
        self.offset, self.size = offset, size

    @overload
    def __get__(self, page: None, owner: type[Page]) -> Word: ...
    @overload
    def __get__(self, page: Page, owner: type[Page]) -> int: ...
    def __get__(self, page: Page | None, owner: type[Page]) -> Word | int:
        return self if page is None else page.words[self.size][self.offset // self.size]

    def __set__(self, page: Page, value: int) -> None:
        page.words[self.size][self.offset // self.size] = value


class TextField:
    """A zero-terminated UTF-8 text of a page; longer text is cut at a character boundary."""

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size

    @overload
    def __get__(self, page: None, owner: type[Page]) -> TextField: ...
    @overload
    def __get__(self, page: Page, owner: type[Page]) -> str: ...
    def __get__(self, page: Page | None, owner: type[Page]) -> TextField | str:
        if page is None:
            return self
        raw = bytes(page.memory[self.offset : self.offset + self.size])
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    def __set__(self, page: Page, value: str) -> None:
        raw = value.encode()[: self.size - 1].decode(errors="ignore").encode()
        page.memory[self.offset : self.offset + self.size] = raw.ljust(self.size, b"\0")


class Page:
    """A mapped page, with `extra_bytes` behind it; read-only unless `writable`."""

    magic = Word(0)
    version = Word(8, 4)

    def __init__(self, fd: int, *, writable: bool, extra_bytes: int = 0) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._mapping = mmap.mmap(fd, PAGE_BYTES + extra_bytes, access=access)
        self.memory = memoryview(self._mapping)
        self.words = {4: self.memory.cast("I"), 8: self.memory.cast("Q")}

    def initialise(self) -> None:
        """Mark a fresh page as one of this layout."""
        self.magic, self.version = MAGIC, LAYOUT_VERSION

    def wake(self, word: Word) -> int:
        """Wake all waiters of a word, which must be writable here; return their number."""
        place = ctypes.c_uint32.from_buffer(self._mapping, word.offset)
        nothing = ctypes.c_void_p()
        woken = _LIBC.syscall(
            ctypes.c_long(_SYS_FUTEX), ctypes.byref(place), _FUTEX_WAKE, _ALL_WAITERS, nothing
        )
        if woken < 0:
            raise InternalError(f"futex wake: {os.strerror(ctypes.get_errno())}")
        return int(woken)

    def close(self) -> None:
        """Unmap it. Idempotent."""
        for view in (*self.words.values(), self.memory):
            view.release()
        self._mapping.close()


class ClientPage(Page):
    """Page written by the notebook's process: end of its log, what it waits for, and its usage."""

    pid = Word(12, 4)
    head = Word(64)
    sleepers = Word(128, 4)
    answer_wanted = Word(136)
    answer_taken = Word(144)
    progress_wanted = Word(152)
    memory_used = Word(192)
    memory_peak = Word(200)
    memory_wanted = Word(208)
    want_sequence = Word(216)
    operators = Word(224)
    cells_running = Word(256, 4)
    cell_changed_ns = Word(264)
    cells_ended = Word(272)
    answer_generation = Word(280)
    awaiting_peers = Word(288, 4)


class WorkerPage(Page):
    """Page written by the worker: what it has executed, and its replies."""

    pid = Word(12, 4)
    consumed = Word(64)
    completed = Word(72)
    bell = Word(128, 4)
    asleep = Word(132, 4)
    gate_open = Word(136, 4)
    epoch = Word(144)
    answer_position = Word(192)
    answer_status = Word(200, 4)
    answer_bytes = Word(208)
    answer_produced = Word(216)
    busy_ns = Word(256)
    active_ns = Word(264)
    memory_resident = Word(272)
    furthest = Word(280)
    stalled_ns = Word(320)
    dirty_bytes = Word(328)
    loading_bytes = Word(336)
    answer_generation = Word(344)
    frozen = Word(352)
    answered_ns = Word(360)
    inexact_ns = Word(368)
    older_answered_ns = Word(376)
    older_inexact_ns = Word(384)
    recovered_ns = Word(392)
    diverged = Word(400)
    device_model = Word(408)
    memory_failures = Word(448)
    memory_unlisted = Word(456)


class AgentPage(Page):
    """Page written by the agent: state of the worker, and what may be overwritten and used."""

    device_kind = Word(12, 4)
    bell = Word(64, 4)
    presence = Word(68, 4)
    retained = Word(72)
    log_budget = Word(80)
    memory_granted = Word(128)
    grant_sequence = Word(136)
    memory_total = Word(144)
    memory_free = Word(152)
    threads = Word(160, 4)
    snapshots = Word(164, 4)
    capability = Word(168, 4)
    processors = Word(172, 4)
    refused_sequence = Word(176)
    memory_quota = Word(184)
    device_name = TextField(192, 64)
    reason = TextField(256, 256)
    deterministic = Word(512, 4)

    def ring(self) -> None:
        """Count a change of this page and wake its waiters.

        This is also a full barrier: the agent's earlier stores are visible to all others before its
        later loads are executed.
        """
        self.bell = (self.bell + 1) & 0xFFFFFFFF
        self.wake(AgentPage.bell)


class SessionMemory:
    """The memfds of a session and the agent's mappings of its pages. Owns all of them.

    Four are the log and the pages. The fifth is the arena, into which workers write the bytes of
    snapshots.

    Parameters
    ----------
    log_bytes : int
        Capacity of the log ring: a power of two. Only written parts of the log use memory.
    """

    #: Names of its descriptors, in their order.
    NAMES = ("log", "client", "worker", "agent", "arena")

    def __init__(self, log_bytes: int) -> None:
        if log_bytes < PAGE_BYTES or log_bytes & (log_bytes - 1):
            raise InternalError(f"{log_bytes} bytes are no capacity of a log")
        self.fds: list[int] = []
        self._create("sing-log", log_bytes)
        self._create("sing-client", PAGE_BYTES)
        self._create("sing-worker", PAGE_BYTES + ANSWER_RING_BYTES)
        self._create("sing-agent", PAGE_BYTES)
        self._create("sing-arena", 0, seals=0)
        self._map()
        for page in (self.client, self.worker, self.agent):
            page.initialise()

    @classmethod
    def adopt(cls, fds: Sequence[int]) -> SessionMemory:
        """Take over the memory that another agent made.

        Parameters
        ----------
        fds : sequence of int
            In the order of `NAMES`; takes ownership.

        Raises
        ------
        InternalError
            If its layout is different.
        """
        memory = cls.__new__(cls)
        memory.fds = list(fds)
        memory._map()
        if (memory.agent.magic, memory.agent.version) != (MAGIC, LAYOUT_VERSION):
            memory.close()
            raise InternalError("the session's memory has another layout")
        return memory

    def _map(self) -> None:
        self.log_fd, self.client_fd, self.worker_fd, self.agent_fd, self.arena_fd = self.fds
        self.log_bytes = os.fstat(self.log_fd).st_size
        self.client = ClientPage(self.client_fd, writable=True)
        self.worker = WorkerPage(self.worker_fd, writable=True)
        self.agent = AgentPage(self.agent_fd, writable=True)

    def _create(self, name: str, size: int, seals: int = SEALS) -> None:
        """Create a memfd of fixed size: access to a page that was cut off would be a SIGBUS.

        (The arena can grow; only processes that write it map it.)
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(fd)
        os.fchmod(fd, 0o600)  # other users cannot reopen a read-only descriptor to write
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)

    def host_bytes(self) -> int:
        """Return the bytes of memory that log and arena use."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in (self.log_fd, self.arena_fd))

    def arena_bytes(self) -> int:
        """Return the bytes of memory that the arena uses."""
        return os.fstat(self.arena_fd).st_blocks * 512

    def empty_arena(self) -> None:
        """Free all of the arena's memory."""
        os.ftruncate(self.arena_fd, 0)

    def kernel_fds(self) -> list[int]:
        """Return new descriptors for the notebook: log and client page; the others read-only."""
        return self._reopen(
            (self.log_fd, os.O_RDWR),
            (self.client_fd, os.O_RDWR),
            (self.worker_fd, os.O_RDONLY),
            (self.agent_fd, os.O_RDONLY),
        )

    def worker_fds(self) -> list[int]:
        """Return new descriptors for a worker; only its own page and the arena are writable."""
        return self._reopen(
            (self.log_fd, os.O_RDONLY),
            (self.client_fd, os.O_RDONLY),
            (self.worker_fd, os.O_RDWR),
            (self.agent_fd, os.O_RDONLY),
            (self.arena_fd, os.O_RDWR),
        )

    @staticmethod
    def _reopen(*wanted: tuple[int, int]) -> list[int]:
        fds: list[int] = []
        try:
            for fd, mode in wanted:
                fds.append(os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC))
        except BaseException:
            close_all(fds)
            raise
        return fds

    def free_log(self, start: int, end: int) -> None:
        """Free the memory of the log from position `start` to `end`, which then reads as zeros.

        Raises
        ------
        InternalError
            If the range is invalid, or the OS kernel refuses.
        """
        if not 0 <= start <= end <= start + self.log_bytes:
            raise InternalError(f"the log has no range {start}..{end}")
        while start < end:
            offset = start % self.log_bytes
            count = min(end - start, self.log_bytes - offset)
            if _LIBC.fallocate(self.log_fd, _PUNCH_HOLE, offset, count) != 0:
                raise InternalError(f"punch hole: {os.strerror(ctypes.get_errno())}")
            start += count

    def log_memory(self) -> int:
        """Return the bytes of memory that the log's pages use now."""
        return os.fstat(self.log_fd).st_blocks * 512

    def close(self) -> None:
        """Unmap and close everything. Idempotent."""
        for page in (self.client, self.worker, self.agent):
            page.close()
        close_all(self.fds)
        self.fds.clear()


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
