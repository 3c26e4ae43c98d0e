"""Directories of images: which count against the quota, and what processes may put into them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kernelproxy.agent.daemon_id import DaemonId
from kernelproxy.agent.process.image_dirs import COMPLETE, ImageDirs
from kernelproxy.agent.workers.process_watch import memory_bytes

MIB = 1 << 20


def fill(directory: Path, name: str, count: int) -> None:
    (directory / name).write_bytes(os.urandom(count))


def test_images_of_a_replacement_process_count(tmp_path: Path) -> None:
    ours, others = (ImageDirs(tmp_path / "images", DaemonId(tmp_path / name)) for name in "ab")
    assert ours.usage() == 0
    of_checkpoint, asleep = ours.make("s1"), others.make("s2", 3 * MIB)
    fill(of_checkpoint, "pages-1.img", MIB)
    assert others.usage() == 3 * MIB  # as long as it is being written
    fill(asleep, "pages-1.img", 2 * MIB)
    assert others.usage() == 3 * MIB
    fill(asleep, COMPLETE, 4096)
    assert ours.usage() == others.usage()
    assert 2 * MIB <= ours.usage() < 3 * MIB
    others.remove(asleep)
    assert ours.usage() == others.usage() == 0


def test_the_memory_of_a_process_is_what_no_file_has(tmp_path: Path) -> None:
    before = memory_bytes(os.getpid(), shared=False)
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1
        assert memory_bytes(os.getpid(), shared=False) >= before + 32 * MIB
    private = memory_bytes(os.getpid(), shared=False)
    with mmap.mmap(-1, 64 * MIB) as memory:
        for at in range(0, len(memory), mmap.PAGESIZE):
            memory[at] = 1
        assert memory_bytes(os.getpid(), shared=True) >= private + 32 * MIB
    assert memory_bytes(0, shared=True) == 0


def test_the_memory_of_children_counts() -> None:
    alone = memory_bytes(os.getpid(), shared=False)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until its parent lets it go
        os._exit(0)
    os.close(read)
    try:
        assert memory_bytes(os.getpid(), shared=False) > alone
    finally:
        os.close(write)
        os.waitpid(child, 0)
