"""Checkpoints that are made and deleted while the origins of others are read."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.checkpoint import catalog
from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog

OWNER = 7


class ReadByHand:
    """A store whose reader waits, after it has read all names, until `continues` is set."""

    def __init__(self, *names: str) -> None:
        self.stored = list(names)
        self.reads, self.continues = threading.Event(), threading.Event()

    def names(self) -> Iterator[tuple[str, str]]:
        yield from [(f"{OWNER}-checkpoints", each) for each in self.stored]
        self.reads.set()
        assert self.continues.wait(30)

    def load(self, user: str, name: str) -> Any:
        meta = {"session": "s", "automatic": False, "kernel_id": "k", "device": "cpu:0"}
        meta |= {"forms": [], "saved": [], "omitted": [], "files": {}}
        label = SimpleNamespace(name=name, owner=user, meta=meta, torch="2.13.0")
        return SimpleNamespace(label=label, created=0.0)

    def sizes(self, user: str, name: str) -> Any:
        return SimpleNamespace(logical=0, stored=0, exclusive=0)

    def delete(self, user: str, name: str) -> None:
        self.stored.remove(name)

    def collect(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("known", [False, True])
def test_a_read_does_not_hide_what_is_made_or_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    store = ReadByHand("kept", "deleted")
    checkpoints = CheckpointCatalog(lambda: store)

    def write(*args: object) -> Any:
        store.stored.append("made")
        return store.load("", "made")

    async def main() -> list[str]:
        if known:
            store.continues.set()
            await checkpoints.learn(OWNER)
            store.continues.clear()
            store.reads.clear()
        reading = asyncio.create_task(checkpoints.records(OWNER))
        await asyncio.to_thread(store.reads.wait, 30)
        argument: Any = None
        changes = [
            asyncio.create_task(checkpoints.delete(OWNER, "deleted")),
            asyncio.create_task(checkpoints.put(OWNER, *[argument] * 7)),
        ]
        while store.stored != ["kept", "made"]:
            await asyncio.sleep(0)
        store.continues.set()
        await asyncio.gather(reading, *changes)
        return [each.name for each in checkpoints.known(OWNER)]

    monkeypatch.setattr(catalog, "write_checkpoint", write)
    assert asyncio.run(main()) == ["kept", "made"]
