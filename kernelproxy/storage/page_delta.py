"""Page-wise delta between two large files, and reconstruction of the second file. Pure.

Two images of one process differ in scattered pages, each in a few bytes, so that large chunks of
them are never equal. A *delta* has one page for each page that differs: the XOR of both, which is
mostly zeros and compresses very well, or the page itself, if that has more zeros. It is always
taken against a *base* that was stored completely, never against another delta.

A *run* is ``[count, base, delta]``: `count` pages, which are those of the base from page `base` on,
XORed with those of the delta from page `delta` on. Either may be -1 for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

PAGE_BYTES = 4096
#: Number of pages that are compared at once.
_BLOCK = 64
#: After this many different pages in a row, equal pages are searched elsewhere in the base.
_LOST_AFTER = 8

Run = list[int]


class Bytes(Protocol):
    """Sequence of bytes whose slices are `bytes`, such as an mmap."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> bytes: ...


def pages(count: int) -> int:
    """Return the number of pages of `count` bytes, rounded up."""
    return -(-count // PAGE_BYTES)


def xor(one: bytes, other: bytes) -> bytes:
    """XOR two byte strings of equal length."""
    mixed = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return mixed.to_bytes(len(one), "little")


class Delta:
    """Delta of consecutive byte strings against a base.

    Parameters
    ----------
    base : Bytes
        A whole number of pages.
    write : callable
        Called with the pages of the delta, in order.
    limit : int
        Maximum number of pages of the delta.
    progress : callable, optional
        Called with the number of bytes that were compared.
    """

    def __init__(
        self,
        base: Bytes,
        write: Callable[[bytes], object],
        limit: int,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.runs: list[Run] = []
        #: Number of pages of the delta so far.
        self.count = 0
        self._base, self._write, self._limit = base, write, limit
        self._progress = progress
        self._base_pages = pages(len(base))
        self._next = 0  # page of the base that should be equal to the next one
        self._lost = 0
        self._places: dict[int, int] | None = None  # page of the base by the hash of its content

    def add(self, content: Bytes) -> bool:
        """Add the next byte string; return True if the delta is still within its limit."""
        total, at = pages(len(content)), 0
        while at < total and self.count <= self._limit:
            step = self._skip(content, at, min(_BLOCK, total - at)) or self._one(content, at)
            if self._progress is not None:
                self._progress(min(step * PAGE_BYTES, len(content) - at * PAGE_BYTES))
            at += step
        return self.count <= self._limit

    def _skip(self, content: Bytes, at: int, count: int) -> int:
        """Record a block that is equal; return its number of pages, or 0."""
        if self._next + count > self._base_pages:
            return 0
        if _slice(content, at, count) != _slice(self._base, self._next, count):
            return 0
        self._note(count, self._next, -1)
        return count

    def _one(self, content: Bytes, at: int) -> int:
        """Record pages up to the end of a block, one by one; return their number."""
        end = min(at + _BLOCK, pages(len(content)))
        for number in range(at, end):
            page = _slice(content, number, 1)
            place = self._place(page)
            if place is not None:
                self._note(1, place, -1)
                continue
            base = _slice(self._base, self._next, 1) if self._next < self._base_pages else b""
            mixed = xor(page, base) if base else b""
            if mixed.count(0) > page.count(0):
                self._write(mixed)
                self._note(1, self._next, self.count)
            else:
                self._write(page)
                self._note(1, -1, self.count)
                self._next += 1
            self.count += 1
        return end - at

    def _place(self, page: bytes) -> int | None:
        """Return the number of an equal page of the base, or None."""
        if self._next < self._base_pages and _slice(self._base, self._next, 1) == page:
            self._lost = 0
            return self._next
        self._lost += 1
        if self._lost < _LOST_AFTER:
            return None
        if self._places is None:
            indices = reversed(range(self._base_pages))
            self._places = {hash(_slice(self._base, index, 1)): index for index in indices}
        found = self._places.get(hash(page))
        if found is None or _slice(self._base, found, 1) != page:
            return None
        self._lost = 0
        return found

    def _note(self, count: int, base: int, delta: int) -> None:
        if base >= 0:
            self._next = base + count
        if self.runs:
            before = self.runs[-1]
            if all(
                now == (then + before[0] if then >= 0 else -1)
                for then, now in ((before[1], base), (before[2], delta))
            ):
                before[0] += count
                return
        self.runs.append([count, base, delta])


def apply(runs: Sequence[Run], base: Bytes, delta: Bytes) -> Iterator[bytes]:
    """Reconstruct the file of which a delta was taken, padded to a whole number of pages.

    Raises
    ------
    ValueError
        If the runs name pages that do not exist.
    """
    for count, base_at, delta_at in runs:
        for at in range(0, count, _BLOCK):
            step = min(_BLOCK, count - at)
            found = [
                _slice(source, start + at, step)
                for source, start in ((base, base_at), (delta, delta_at))
                if start >= 0
            ]
            if not found or any(len(each) != step * PAGE_BYTES for each in found):
                raise ValueError("a run names pages that are not there")
            yield xor(*found) if len(found) == 2 else found[0]


def _slice(content: Bytes, page: int, count: int) -> bytes:
    """Return consecutive pages, the last one padded with zeros."""
    found = content[page * PAGE_BYTES : (page + count) * PAGE_BYTES]
    short = -len(found) % PAGE_BYTES
    return found + bytes(short) if short else found
