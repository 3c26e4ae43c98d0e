"""Chunk files: bytes named by their hash, one file each, written and read with direct I/O.

Direct I/O is two to three times as fast here as buffered I/O, and a snapshot that is written to
disk must not evict other data from the page cache. It needs aligned memory and lengths, so a
chunk's file is a whole number of blocks: header, payload, zeros. File systems without direct I/O
are used through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernelproxy.common.errors import InternalError, StoreError, StoreReason
from kernelproxy.storage.manifest import Size
from kernelproxy.storage.optional_deps import hash_of, zstandard

BLOCK_BYTES = 4096
DAMAGED = ".damaged"

_MAGIC = b"SINGCHNK"
_VERSION = 1
_RAW, _ZSTD = 0, 1
#: magic, version, coding, zeros, bytes of the content, bytes of the payload
_HEADER = struct.Struct("<8sHB5xQQ")

_HUGE_BYTES = 2 << 20

_LEVEL = 1
_SAMPLES, _SAMPLE_BYTES = 4, 16 << 10
#: Maximum ratio of compressed to original size. Compression is slower than the disk, so it must
#: save this much: real redundancy (zeros, masks, integers) does, the exponents of weights do not.
_WORTHWHILE = 0.75

_REASONS: dict[int, tuple[StoreReason, str]] = {
    errno.ENOSPC: ("full", "free some space, or delete checkpoints"),
    errno.EDQUOT: ("full", "free some space, or delete checkpoints"),
    errno.EFBIG: ("full", "raise the limit of file sizes"),
    errno.EACCES: ("permission", "check who owns it"),
    errno.EPERM: ("permission", "check who owns it"),
    errno.EROFS: ("permission", "mount it writable"),
}


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Convert an OSError in the context into a `StoreError` with a user-facing text."""
    try:
        yield
    except OSError as error:
        reason: StoreReason
        reason, advice = _REASONS.get(error.errno or 0, ("failed", ""))
        where = f" ({error.filename})" if error.filename else ""
        text = f"Cannot {doing}: {error.strerror or error}{where}"
        raise StoreError(f"{text}; {advice}." if advice else f"{text}.", reason) from error


def sync_directory(path: Path) -> None:
    """Sync a directory, so that renames and unlinks in it survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def aligned_memory(count: int) -> memoryview:
    """Return memory for direct I/O, in whole blocks, and in huge pages if available.

    The disk of a virtual machine receives a list of all pages of a transfer. On this machine it is
    three times as fast with huge pages as with pages of 4 KiB.
    """
    # Shared memory, which is mmap's default, has no huge pages here.
    memory = mmap.mmap(-1, count + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES
    whole = count // _HUGE_BYTES * _HUGE_BYTES  # no huge page for the few bytes at the end
    if whole:
        with suppress(AttributeError, OSError):  # an OS kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    with suppress(OSError):  # a fork must not move pages during a transfer
        memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)[begin : begin + count]


class ChunkBuffer:
    """I/O buffer of one thread: memory for one chunk's file, with compressor and decompressor.

    Parameters
    ----------
    chunk_bytes : int
        Length of the longest chunk.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._file = aligned_memory(_file_bytes(chunk_bytes))
        self.chunk_bytes = chunk_bytes
        self._room: memoryview | None = None
        self._packer = zstandard().ZstdCompressor(level=_LEVEL)
        self._unpacker = zstandard().ZstdDecompressor()

    @property
    def file(self) -> memoryview:
        """Aligned memory for a complete file."""
        return self._file

    def forget(self) -> None:
        """Free the memory for decompression, which only few chunks need."""
        self._room = None

    def content(self, count: int) -> memoryview:
        """Return the memory to which a chunk of `count` bytes is written before `seal`."""
        return self._file[_HEADER.size : _HEADER.size + count]

    def seal(self, count: int) -> int:
        """Convert the content into the file's bytes, in place; return their number."""
        content = self.content(count)
        packed = self._packed(content)
        if packed is None:
            coding, payload = _RAW, count
        else:
            coding, payload = _ZSTD, len(packed)
            content[:payload] = packed
        _HEADER.pack_into(self._file, 0, _MAGIC, _VERSION, coding, count, payload)
        length = _file_bytes(payload)
        end = _HEADER.size + payload
        self._file[end:length] = bytes(length - end)
        return length

    def _packed(self, content: memoryview) -> bytes | None:
        """Compress; return None if it is not worthwhile, which a sample shows quickly."""
        if len(content) > 2 * _SAMPLES * _SAMPLE_BYTES:
            step = len(content) // _SAMPLES
            sample = b"".join(
                content[at : at + _SAMPLE_BYTES] for at in range(0, step * _SAMPLES, step)
            )
            if len(self._packer.compress(sample)) > _WORTHWHILE * len(sample):
                return None
        packed = self._packer.compress(content)
        # For a short chunk, compression must save at least one block.
        return packed if _file_bytes(len(packed)) < _file_bytes(len(content)) else None

    def open(self, length: int) -> memoryview:
        """Decode the content from a file's bytes, which are untrusted.

        Raises
        ------
        ValueError
            If they are not a valid chunk.
        """
        if length < BLOCK_BYTES:
            raise ValueError("it is too short")
        magic, version, coding, count, payload = _HEADER.unpack_from(self._file)
        if (magic, version) != (_MAGIC, _VERSION) or any(self._file[11:16]):
            raise ValueError("its header is wrong")
        if length != _file_bytes(payload):
            raise ValueError("its length is wrong")
        rest = bytes(self._file[_HEADER.size + payload : length])
        if rest.count(0) != len(rest):
            raise ValueError("its length is wrong")
        body = self._file[_HEADER.size : _HEADER.size + payload]
        if coding == _RAW and count == payload:
            return body
        if coding != _ZSTD or count > self.chunk_bytes:
            raise ValueError("its header is wrong")
        if self._room is None:
            self._room = memoryview(bytearray(self.chunk_bytes))
        room = self._room[:count]
        try:
            with self._unpacker.stream_reader(body) as reader:
                done = 0
                while done < count and (step := reader.readinto(room[done:])):
                    done += step
                rest = reader.read(1)
        except zstandard().ZstdError as error:
            raise ValueError(str(error)) from error
        if done != count or rest:
            raise ValueError("its length is wrong")
        return room


class BufferPool:
    """Pool of I/O buffers (`ChunkBuffer`), kept for the next job because they are slow to allocate.

    Huge pages must be cleared. In a virtual machine whose host has reclaimed free memory, that time
    is spent waiting for the host.

    Parameters
    ----------
    kept_max : int
        Maximum number of buffers in the pool.
    """

    def __init__(self, kept_max: int = 8) -> None:
        self._kept_max = kept_max
        self._kept: list[ChunkBuffer] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, chunk_bytes: int) -> Iterator[Callable[[], ChunkBuffer]]:
        """Lend buffers for chunks of a given length until the end of the context.

        Yields
        ------
        callable
            Returns a buffer, to any thread. All threads must have finished when the context ends.
        """
        lent: list[ChunkBuffer] = []

        def take() -> ChunkBuffer:
            with self._lock:
                while self._kept:
                    buffer = self._kept.pop()
                    if buffer.chunk_bytes == chunk_bytes:
                        break
                else:
                    buffer = ChunkBuffer(chunk_bytes)
                lent.append(buffer)
            return buffer

        yield take
        # Not after an error: a thread might still use its buffer.
        with self._lock:
            for buffer in lent[: self._kept_max - len(self._kept)]:
                buffer.forget()
                self._kept.append(buffer)


class ChunkFiles:
    """The directories ``chunks`` and ``tmp`` of a store.

    A chunk's file appears complete, by a rename, after its bytes are on the disk. Its directory
    entry is durable after `sync_directory` of its directory and of ``chunks``.
    """

    def __init__(self, root: Path) -> None:
        self.chunks, self.temporary = root / "chunks", root / "tmp"

    def path(self, key: str) -> Path:
        """Return the path of a chunk's file."""
        return self.chunks / key[:2] / key

    def find(self, key: str, count: int) -> int | None:
        """Return the length of a chunk's file; None if it is missing or its header is wrong."""
        try:
            fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            header = os.pread(fd, _HEADER.size, 0)
            length = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if len(header) < _HEADER.size:
            return None
        magic, version, _, content, payload = _HEADER.unpack(header)
        right = (magic, version, content, length) == (_MAGIC, _VERSION, count, _file_bytes(payload))
        return length if right else None

    def has(self, key: str, stored: int) -> bool:
        """True if the file of a chunk that a manifest names exists with the length given there."""
        try:
            found = self.path(key).stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == stored

    def write(self, buffer: ChunkBuffer, key: str, count: int) -> int:
        """Write the content of a buffer to the chunk's file.

        Returns
        -------
        int
            Length of the file.
        """
        length = buffer.seal(count)
        temporary = self.temporary / secrets.token_hex(8)
        try:
            fd = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                _write_all(fd, buffer.file[:length])
                os.fdatasync(fd)
            finally:
                os.close(fd)
            try:
                temporary.rename(self.path(key))
            except FileNotFoundError:
                self.path(key).parent.mkdir(mode=0o700, exist_ok=True)
                temporary.rename(self.path(key))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return length

    def read(self, buffer: ChunkBuffer, key: str, size: Size) -> memoryview:
        """Read a chunk and return its verified content, in the buffer's memory: see `verified`."""
        return self.verified(buffer, self.load(buffer, key), key, size)

    def load(self, buffer: ChunkBuffer, key: str) -> int:
        """Read the file of a chunk into the buffer, without verification.

        Returns
        -------
        int
            Its length; 0 if it cannot be valid.

        Raises
        ------
        StoreError
            ``missing`` or ``damaged``.
        """
        try:
            fd = _open(self.path(key), os.O_RDONLY)
        except FileNotFoundError:
            if self.path(key + DAMAGED).exists():
                raise StoreError(f"The chunk {key} is damaged.", "damaged") from None
            raise StoreError(f"The chunk {key} is missing.", "missing") from None
        try:
            length = os.fstat(fd).st_size
            if not 0 < length <= len(buffer.file) or length % BLOCK_BYTES:
                return 0
            done = 0
            while done < length:
                step = os.preadv(fd, [buffer.file[done:length]], done)
                if not step:
                    return 0
                done += step
            return length
        finally:
            os.close(fd)

    def verified(self, buffer: ChunkBuffer, length: int, key: str, size: Size) -> memoryview:
        """Verify a chunk whose file was loaded, and return its content in the buffer's memory.

        The file of a damaged chunk is renamed, so that the next `put` of these bytes writes them
        again instead of reusing it.

        Raises
        ------
        StoreError
            ``missing`` or ``damaged``.
        """
        try:
            return _content(buffer, length, key, size)
        except ValueError:
            # Retry once: it may be a read error, and not damage on disk.
            try:
                return _content(buffer, self.load(buffer, key), key, size)
            except ValueError as error:
                path = self.path(key)
                with suppress(OSError):
                    path.rename(path.with_name(key + DAMAGED))
                raise StoreError(f"The chunk {key} is damaged: {error}.", "damaged") from error


def _content(buffer: ChunkBuffer, length: int, key: str, size: Size) -> memoryview:
    """Return the content of a loaded file; raises ValueError if it does not match the key."""
    content = buffer.open(length)
    if len(content) != size.content or hash_of(content) != key:
        raise ValueError("its hash is wrong")
    return content


def _file_bytes(payload: int) -> int:
    """Return the length of a file with `payload` bytes of payload."""
    return -(-(_HEADER.size + payload) // BLOCK_BYTES) * BLOCK_BYTES


def _open(path: Path, flags: int) -> int:
    """Open a file for direct I/O, or for buffered I/O if the file system has no direct I/O."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        try:
            step = os.write(fd, data[done:])
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if not step:
            raise InternalError("a write wrote nothing")
        done += step
