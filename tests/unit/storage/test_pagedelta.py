"""A delta and its base restore the original, and the delta is small where they agree."""

from __future__ import annotations

import random
import zlib

import pytest

from kernelproxy.storage.page_delta import PAGE_BYTES, Delta, apply, pages, xor


def random_pages(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count * PAGE_BYTES)


def taken(base: bytes, *contents: bytes, limit: int = 1 << 20) -> tuple[Delta, bytes]:
    written = bytearray()
    delta = Delta(base, written.extend, limit)
    for content in contents:
        assert delta.add(content)
    return delta, bytes(written)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % PAGE_BYTES)


def check(base: bytes, *contents: bytes) -> tuple[Delta, bytes]:
    delta, written = taken(base, *contents)
    whole = b"".join(apply(delta.runs, base, written))
    assert whole == b"".join(padded(each) for each in contents)
    return delta, written


def test_the_same_again_is_one_run() -> None:
    base = random_pages(300)
    delta, written = check(base, base)
    assert (delta.runs, written) == ([[300, 0, -1]], b"")


def test_a_few_bytes_in_a_page_are_a_page_of_zeros() -> None:
    base = random_pages(200)
    changed = bytearray(base)
    for page in (0, 63, 64, 130, 199):
        changed[page * PAGE_BYTES + 100] ^= 0xFF
    delta, written = check(base, bytes(changed))
    assert delta.count == 5
    assert len(zlib.compress(written, 1)) < 500


def test_moved_pages_are_found_again() -> None:
    base, new = random_pages(300), random_pages(50, seed=1)
    at = 100 * PAGE_BYTES
    delta, _ = check(base, base[:at] + new + base[at:])
    assert 50 <= delta.count < 70
    delta, _ = check(base, base[at:] + base[:at])
    assert delta.count < 20


@pytest.mark.parametrize("length", [0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 3 * PAGE_BYTES, 400_001])
def test_any_length_comes_back(length: int) -> None:
    content = random_pages(100, seed=2)[:length]
    for base in (b"", padded(content), random_pages(20)):
        check(base, content, content, b"")


def test_random_changes_come_back() -> None:
    chance = random.Random(5)
    base = random_pages(150)
    for _ in range(30):
        content = bytearray(base)
        for _ in range(chance.randrange(40)):
            at = chance.randrange(len(content))
            content[at : at + chance.randrange(5000)] = chance.randbytes(chance.randrange(5000))
        check(base, bytes(content[: chance.randrange(len(content))]))


def test_a_delta_that_grows_too_large_is_given_up() -> None:
    delta = Delta(random_pages(10), lambda _: None, limit=5)
    assert not delta.add(random_pages(200, seed=3))
    assert delta.count < 100


@pytest.mark.parametrize("runs", [[[2, 9, -1]], [[1, -1, 0]], [[1, -1, -1]], [[1, 0, 3]]])
def test_runs_that_lead_nowhere_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="not there"):
        list(apply(runs, random_pages(10), b""))


def test_xor_undoes_itself() -> None:
    one, other = random_pages(1), random_pages(1, seed=4)
    assert xor(xor(one, other), other) == one
    assert pages(PAGE_BYTES + 1) == 2
