"""The Python view of the shared pages agrees with the header that defines them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.common import shared_memory
from kernelproxy.common.errors import InternalError
from kernelproxy.common.shared_memory import (
    AgentPage,
    ClientPage,
    Page,
    SessionMemory,
    TextField,
    Word,
    WorkerPage,
)

LAYOUT = (Path(__file__).parents[3] / "native/oplog/layout.h").read_text()
#: Arrays, which only the worker uses.
ARRAYS = {"memory_failed"}
TYPES = {"uint64_t": 8, "uint32_t": 4, "Word<uint64_t>": 8, "Word<uint32_t>": 4}


def constant(name: str) -> int:
    """Return the value of a number, or of a constant of layout.h."""
    if name.isdigit():
        return int(name)
    found = re.search(rf"{name} = (?:size_t\{{(\d+)\}} << (\d+)|(\w+));", LAYOUT)
    assert found is not None
    return int(found[1]) << int(found[2]) if found[1] else int(found[3], 0)


def fields_of(struct: str) -> dict[str, tuple[int, int]]:
    """Return offset and size of each field of a struct of layout.h, by the rules of C++."""
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", LAYOUT, re.DOTALL)
    assert body is not None
    found, offset = {}, 0
    declaration = r"^\s*(alignas\(kLine\) )?([\w<>]+) (\w+)(?:\[(\w+)\])?;"
    for aligned, kind, name, count in re.findall(declaration, body[1], re.MULTILINE):
        alignment = 1 if kind == "char" else TYPES[kind]
        size = alignment * (constant(count) if count else 1)
        step = 64 if aligned else alignment
        offset = -(-offset // step) * step
        found[name] = (offset, size)
        offset += size
    return found


@pytest.mark.parametrize("page", [ClientPage, WorkerPage, AgentPage])
def test_every_word_lies_where_the_header_puts_it(page: type[Page]) -> None:
    words = {
        name: (word.offset, word.size)
        for owner in page.__mro__
        for name, word in vars(owner).items()
        if isinstance(word, Word | TextField)
    }
    fields = fields_of(page.__name__)
    assert words == {name: fields[name] for name in fields if name not in ARRAYS}


@pytest.mark.parametrize("page", [ClientPage, WorkerPage, AgentPage])
def test_the_headers_assertions_agree_with_its_fields(page: type[Page]) -> None:
    asserted = re.findall(rf"offsetof\({page.__name__}, (\w+)\) == (\d+)", LAYOUT)
    assert len(asserted) > 5
    fields = fields_of(page.__name__)
    assert all(fields[name][0] == int(offset) for name, offset in asserted)


def test_constants_agree_with_the_header() -> None:
    assert constant("kMagic") == shared_memory.MAGIC
    assert constant("kLayoutVersion") == shared_memory.LAYOUT_VERSION
    assert constant("kPageBytes") == shared_memory.PAGE_BYTES
    assert constant("kAnswerRingBytes") == shared_memory.ANSWER_RING_BYTES
    presence = re.search(r"enum class Presence.*?\{(.*?)\}", LAYOUT, re.DOTALL)
    assert presence is not None
    named = dict(re.findall(r"(\w+) = (\d+),", presence[1]))
    assert named == {each.name.lower(): str(each.value) for each in shared_memory.Presence}


@pytest.fixture
def memory() -> Iterator[SessionMemory]:
    memory = SessionMemory(1 << 20)
    yield memory
    memory.close()


def test_words_are_shared_between_mappings(memory: SessionMemory) -> None:
    fds = memory.worker_fds()
    client = ClientPage(fds[1], writable=False)
    memory.client.head = 1 << 40
    assert client.head == 1 << 40
    with pytest.raises(TypeError):
        client.head = 1
    client.close()
    shared_memory.close_all(fds)


def test_a_kernel_cannot_write_to_the_pages_of_others(memory: SessionMemory) -> None:
    fds = memory.kernel_fds()
    for fd in fds[2:]:
        with pytest.raises(PermissionError):
            Page(fd, writable=True)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    shared_memory.close_all(fds)


def test_a_page_cannot_be_shrunk(memory: SessionMemory) -> None:
    for fd in (memory.log_fd, memory.client_fd, memory.worker_fd, memory.agent_fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_a_freed_range_of_the_log_takes_no_memory(memory: SessionMemory) -> None:
    os.pwrite(memory.log_fd, b"x" * memory.log_bytes, 0)
    assert memory.log_memory() == memory.log_bytes
    half = memory.log_bytes // 2
    memory.free_log(half, memory.log_bytes + half)  # wraps around
    assert memory.log_memory() == 0
    with pytest.raises(InternalError):
        memory.free_log(0, memory.log_bytes + 1)


def test_a_long_reason_is_cut_at_a_whole_character(memory: SessionMemory) -> None:
    memory.agent.reason = "é" * 200
    assert memory.agent.reason == "é" * 127
    memory.agent.reason = "short"
    assert memory.agent.reason == "short"


def test_ringing_counts_and_wraps(memory: SessionMemory) -> None:
    memory.agent.bell = 0xFFFFFFFF
    memory.agent.ring()
    assert memory.agent.bell == 0


def test_closing_gives_everything_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    memory = SessionMemory(1 << 20)
    memory.close()
    memory.close()
    assert set(os.listdir("/proc/self/fd")) == before
