"""Processes as they are seen from outside their sandbox."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from kernelproxy.criu.process_tree import is_within, numbers, shared_memory, tree

#: Maps a file, starts another process that does, and ends with its input.
PROGRAM = """
import mmap, subprocess, sys
fd, depth = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(fd, 4096)
if depth:
    command = [sys.executable, "-c", sys.argv[3], str(fd), "0", ""]
    child = subprocess.Popen(command, stdin=0, pass_fds=[fd])
print("ready", flush=True)
sys.stdin.read()
"""


def test_processes_that_share_memory_are_found() -> None:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 4096)
    command = [sys.executable, "-c", PROGRAM, str(fd), "1", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == b"ready\n"
        found = list(tree(process.pid))
        assert found[0] == process.pid
        assert len(found) == 2
        assert all(is_within(pid, process.pid) for pid in found)
        assert is_within(found[1], os.getpid())
        assert not is_within(process.pid, found[1])
        assert [len(numbers(pid)) for pid in found] == [len(numbers(os.getpid()))] * 2
        assert shared_memory(found) == "shared"
        assert shared_memory(found[:1]) is None
        assert process.stdin is not None
        process.stdin.close()
    assert not is_within(found[1], os.getpid())
    with pytest.raises(OSError, match="No such"):
        shared_memory(found)
    with mmap.mmap(fd, 4096):
        assert shared_memory([os.getpid()]) is None
    os.close(fd)
