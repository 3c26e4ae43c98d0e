"""Rates at which this machine copies memory, and writes and reads its disk, for comparison."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernelproxy.storage.chunk_file import aligned_memory

#: The same values as in the chunk store (`kernelproxy/storage`).
PIECE_BYTES, DISK_THREADS = 4 << 20, 4
COPY_BYTES, COPIES = 256 << 20, 5


def memcpy_rate() -> float:
    """Return the bytes copied per nanosecond by one thread between warm buffers."""
    source = bytearray(os.urandom(1 << 20) * (COPY_BYTES >> 20))
    target = bytearray(len(source))
    seconds = []
    for _ in range(COPIES):
        begin = time.perf_counter()
        target[:] = source
        seconds.append(time.perf_counter() - begin)
    return len(source) / min(seconds) / 1e9


def fresh_rate() -> float:
    """Return the bytes per nanosecond that two threads write into newly allocated shared memory.

    This bounds every copy into new memory, such as that of a state that moves.
    """
    pieces = range(0, COPIES * COPY_BYTES, PIECE_BYTES)
    source = os.urandom(PIECE_BYTES)
    fd = os.memfd_create("rate", os.MFD_CLOEXEC)
    try:
        with ThreadPoolExecutor(2) as threads:
            begin = time.perf_counter()
            for _ in threads.map(lambda at: os.pwrite(fd, source, at), pieces):
                pass
            return len(pieces) * PIECE_BYTES / (time.perf_counter() - begin) / 1e9
    finally:
        os.close(fd)


def disk_rates(directory: Path, count: int) -> tuple[float, float]:
    """Return the bytes per nanosecond written to and read from a disk, bypassing the page cache.

    One file is written in pieces by several threads, synced, and read in the same way.

    Parameters
    ----------
    directory : Path
        Directory for the temporary file.
    count : int
        Size of the file in bytes; rounded up to whole pieces.

    Returns
    -------
    write, read : float
    """
    pieces = -(-count // PIECE_BYTES)
    memory = aligned_memory(PIECE_BYTES)
    memory[:] = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryDirectory(dir=directory) as inner:
        fd = _open_direct(Path(inner) / "rate")
        try:
            with ThreadPoolExecutor(DISK_THREADS) as threads:
                write = _seconds(
                    threads, pieces, lambda at: os.pwrite(fd, memory, at), lambda: os.fsync(fd)
                )
                rooms = [aligned_memory(PIECE_BYTES) for _ in range(DISK_THREADS)]

                def read_piece(at: int) -> int:
                    room = rooms.pop()
                    try:
                        return os.preadv(fd, [room], at)
                    finally:
                        rooms.append(room)

                read = _seconds(threads, pieces, read_piece, lambda: None)
        finally:
            os.close(fd)
    return pieces * PIECE_BYTES / write / 1e9, pieces * PIECE_BYTES / read / 1e9


def _seconds(
    threads: ThreadPoolExecutor, pieces: int, move: Callable[[int], int], end: Callable[[], None]
) -> float:
    """Return the seconds for moving all pieces of a file."""
    begin = time.perf_counter()
    for moved in threads.map(move, range(0, pieces * PIECE_BYTES, PIECE_BYTES)):
        if moved != PIECE_BYTES:
            raise OSError("a piece was moved in part")
    end()
    return time.perf_counter() - begin


def _open_direct(path: Path) -> int:
    """Make a file for direct I/O, or for buffered I/O if the file system does not support it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600)
