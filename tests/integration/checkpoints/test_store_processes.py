"""The chunk store with several processes, which are killed at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import StoreError
from kernelproxy.storage.chunk_store import ChunkStore
from kernelproxy.storage.manifest import Label
from tests.doubles.storage import storing

ROOT = Path(__file__).parents[3]
KILLS = 200


class Workshop:
    """A process that forks others on demand; see `storing`."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.doubles.storage.storing", str(root)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, **order: Any) -> None:
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def end(self) -> tuple[list[list[Any]], int]:
        assert self._process.stdout is not None
        said, status = json.loads(self._process.stdout.readline())
        return said, status

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait() == 0


@contextmanager
def workshop(root: Path) -> Iterator[Workshop]:
    shop = Workshop(root)
    try:
        yield shop
    finally:
        shop.close()


def chunk_files(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in root.glob("chunks/*/*")}


def named_chunks(store: ChunkStore) -> dict[str, int]:
    return {
        key: size.stored
        for owner, name in store.names()
        for key, size in store.load(owner, name).chunks.items()
    }


class Model:
    """Names that are certainly stored, according to the output of the processes."""

    def __init__(self) -> None:
        self._seeds: dict[tuple[str, str], int] = {}

    def learn(self, said: list[list[Any]], found: dict[tuple[str, str], int]) -> None:
        """Check the names found after a kill against the output before it, and adopt them."""
        unfinished = None
        for word, *rest in said:
            if word == "begin":
                unfinished = rest
            else:
                assert word == "end" or rest == ["unknown"], (word, rest)
                if word == "end":
                    assert unfinished is not None
                    self._seeds = self._after(unfinished)
                unfinished = None
        allowed = [self._seeds] + ([self._after(unfinished)] if unfinished else [])
        assert found in allowed
        self._seeds = found

    def _after(self, operation: list[Any]) -> dict[tuple[str, str], int]:
        kind, owner, name, seed = operation
        seeds = dict(self._seeds)
        if kind == "put":
            seeds[owner, name] = seed
        elif kind == "delete":
            seeds.pop((owner, name), None)
        return seeds


@pytest.mark.slow
def test_kill_at_any_moment_loses_nothing_and_offers_nothing_half_written(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = storing.store_at(root)
    dice, model, dirty = random.Random(3), Model(), 0
    with workshop(root) as shop:
        for number in range(KILLS):
            shop.begin(
                seed=number,
                kinds=["put", "put", "put", "delete", "collect"],
                operations=10**9,  # it must not end by itself before it is killed
                kill_at=dice.randrange(1, 500),
                outside=number % 2 == 1,
            )
            said, status = shop.end()
            assert status == -signal.SIGKILL, said
            found = {place: storing.restore(store, *place) for place in store.names()}
            model.learn(said, found)
            left = [*root.glob("tmp/*")]
            if left or chunk_files(root).keys() - named_chunks(store).keys():
                dirty += 1
            if number % 3 == 0:
                store.collect()
                assert chunk_files(root) == named_chunks(store)
                assert not [*root.glob("tmp/*")]
    # Otherwise the kills did not happen at the intended moments.
    assert dirty > KILLS // 4


@pytest.mark.slow
def test_collection_beside_storing_removes_nothing_that_is_needed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = storing.store_at(root)
    with workshop(root) as storers, workshop(root) as collectors:
        storers.begin(seed=1, kinds=["put", "put", "get", "delete"], operations=150)
        collections = 0
        while not collections:  # all may have met one slow operation
            collectors.begin(seed=2, kinds=["collect"], operations=400)
            said, status = collectors.end()
            collections = said.count(["end"])
            assert (status, collections + said.count(["failed", "busy"])) == (0, 400)
        stored, status = storers.end()
    assert status == 0
    reasons = {words[1] for words in stored if words[0] == "failed"}
    assert reasons <= {"unknown"}, "a chunk was taken away, or a lock hung"
    for place in store.names():
        storing.restore(store, *place)
    store.collect()
    assert chunk_files(root) == named_chunks(store)


def test_missing_permission_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "store"
    storing.put(storing.store_at(root), "ann", "one", 1)
    with workshop(root) as shop:
        root.chmod(0)
        try:
            shop.begin(seed=5, kinds=["put", "get", "collect"], operations=12, nobody=True)
            said, status = shop.end()
        finally:
            root.chmod(0o700)
    assert status == 0
    kinds = {words[1] for words in said if words[0] == "begin"}
    assert kinds == {"put", "get", "collect"}
    assert {tuple(words) for words in said if words[0] != "begin"} == {("failed", "permission")}
    assert storing.restore(storing.store_at(root), "ann", "one") == 1


def test_same_bytes_stored_by_two_processes_at_once_are_stored_once(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = storing.store_at(root)
    with workshop(root) as one, workshop(root) as two:
        for shop in (one, two):
            shop.begin(seed=7, kinds=["put"], operations=10)
        assert [one.end()[1], two.end()[1]] == [0, 0]
    for place in store.names():
        storing.restore(store, *place)
    store.collect()
    assert chunk_files(root) == named_chunks(store)


def test_nothing_is_collected_while_a_process_stores(tmp_path: Path) -> None:
    store = storing.store_at(tmp_path / "store")
    extents, _ = storing.content(1)
    fd = storing.arena_with(extents)
    refused = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(StoreError) as caught:
            storing.store_at(store.root).collect()
        refused.append(caught.value.reason)

    try:
        label = Label("ann", "one", "session", "2.13.0", "software")
        store.put(label, fd, [extent for extent, _ in extents], progress=progress)
    finally:
        os.close(fd)
    assert set(refused) == {"busy"}
