"""Processes that store, delete and collect, and are killed: forks of one with all imports done.

    python -m tests.doubles.storage.storing ROOT

Reads orders, a line of JSON each, and answers each with one line. An order forks a process that
works with the store at ROOT until it is killed or its order is done; the answer has its output and
its exit status.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Extent, Label

CHUNK_BYTES = 4096
NAMES = [(owner, name) for owner in ("ann", "bob") for name in ("one", "two", "three")]
NOBODY = 65534


def store_at(root: Path) -> ChunkStore:
    return ChunkStore(root, chunk_bytes=CHUNK_BYTES, threads=3)


def content(seed: int) -> tuple[list[tuple[Extent, bytes]], dict[str, bytes]]:
    """Return extents with their bytes, and blobs, of a snapshot; snapshots share some extents."""
    dice = random.Random(seed)
    extents, offset = [], 0
    for _ in range(dice.randrange(1, 5)):
        count = dice.randrange(1, 3 * CHUNK_BYTES)
        shared = dice.randrange(4) if dice.random() < 0.5 else seed
        raw = random.Random(f"{shared} {count if shared == seed else 0}").randbytes(3 * CHUNK_BYTES)
        extents.append((Extent(offset, count, seed), raw[:count]))
        offset += -(-count // CHUNK_BYTES) * CHUNK_BYTES
    return extents, {"tables": dice.randbytes(dice.randrange(1, 100))}


def arena_with(extents: list[tuple[Extent, bytes]]) -> int:
    fd = os.memfd_create("storing", os.MFD_CLOEXEC)
    for extent, raw in extents:
        os.pwrite(fd, raw, extent.offset)
    return fd


def put(store: ChunkStore, owner: str, name: str, seed: int) -> None:
    extents, blobs = content(seed)
    fd = arena_with(extents)
    try:
        label = Label(owner, name, "session", "2.13.0", "software", meta={"seed": seed})
        store.put(label, fd, [extent for extent, _ in extents], blobs=blobs)
    finally:
        os.close(fd)


def restore(store: ChunkStore, owner: str, name: str) -> int:
    """Compare a stored snapshot with what was stored; return its seed."""
    manifest = store.load(owner, name)
    seed = int(manifest.label.meta["seed"])
    extents, blobs = content(seed)
    assert [extent for extent, _ in extents] == list(manifest.extents)
    fd = os.memfd_create("restoring", os.MFD_CLOEXEC)
    try:
        there: list[int] = []
        store.get(manifest, fd, on_extent=there.append)
        assert sorted(there) == list(range(len(extents)))
        for extent, raw in extents:
            assert os.pread(fd, extent.count, extent.offset) == raw
    finally:
        os.close(fd)
    assert {key: store.blob(manifest, key) for key in manifest.blobs} == blobs
    return seed


class Child:
    """One forked process: its random program, and when it dies."""

    def __init__(self, root: Path, say: int, order: dict[str, Any]) -> None:
        self._root, self._say, self._order = root, say, order
        self._calls = itertools.count(1)

    def run(self) -> None:
        if self._order.get("nobody") and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        if self._order.get("kill_at"):
            threading.setprofile(self._count)
            sys.setprofile(self._count)
        dice = random.Random(self._order["seed"])
        for number in range(self._order["operations"]):
            self._operate(dice, number)

    def _count(self, frame: object, event: str, called: object) -> None:
        """Die before a system call, or let the parent kill this process some time after it."""
        if event != "c_call" or getattr(called, "__module__", None) not in ("posix", "fcntl"):
            return
        if next(self._calls) == self._order["kill_at"]:
            if self._order["outside"]:
                self._tell("kill")
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, *words: object) -> None:
        os.write(self._say, json.dumps(words).encode() + b"\n")

    def _operate(self, dice: random.Random, number: int) -> None:
        kind = dice.choice(self._order["kinds"])
        owner, name = dice.choice(NAMES)
        seed = self._order["seed"] * 1000 + number
        self._tell("begin", kind, owner, name, seed)
        try:
            store = store_at(self._root)
            if kind == "put":
                put(store, owner, name, seed)
            elif kind == "get":
                restore(store, owner, name)
            elif kind == "delete":
                store.delete(owner, name)
            else:
                store.collect()
        except StoreError as error:
            self._tell("failed", error.reason)
        else:
            self._tell("end")


def fork(root: Path, order: dict[str, Any]) -> tuple[list[list[Any]], int]:
    """Run a child; return its output and its exit status, negative for a signal."""
    listen, say = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(listen)
            Child(root, say, order).run()
            status = 0
        finally:
            os._exit(status)
    os.close(say)
    said = []
    with open(listen, "rb") as lines:
        for line in lines:
            words = json.loads(line)
            if words == ["kill"]:
                os.kill(pid, signal.SIGKILL)
            else:
                said.append(words)
    return said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    root = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(fork(root, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
