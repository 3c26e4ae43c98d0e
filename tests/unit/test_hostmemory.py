"""Who is asked to go to disk, and when again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kernelproxy.agent import hostmemory
from kernelproxy.agent.cold import ColdStates
from kernelproxy.agent.hostmemory import HostMemory
from kernelproxy.agent.tiers import Parked
from kernelproxy.errors import StoreError


class Guest:
    """Has a state in host memory until it was chilled so often."""

    def __init__(self, tries: int) -> None:
        self.id, self.left = "guest", tries
        self.claimed = False
        self.there = asyncio.Event()

    @property
    def host_bytes(self) -> int:
        return 0 if self.there.is_set() else 1000

    def as_parked(self) -> Parked | None:
        gone = self.claimed or self.there.is_set()
        return None if gone else Parked(self.id, self.host_bytes, 0.0)

    async def chill(self) -> bool:
        self.left -= 1
        if self.left:
            raise StoreError("There is no space.", "full")
        self.there.set()
        return True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(hostmemory, "LOOK_SECONDS_MIN", 0.01)


def test_who_was_refused_is_asked_again_though_nothing_changes(tmp_path: Path) -> None:
    async def run() -> None:
        guest = Guest(tries=3)
        host = HostMemory(100, 0.0, ColdStates(tmp_path, 1 << 30), lambda: [guest])
        host.changed()
        await asyncio.wait_for(guest.there.wait(), 30)
        assert guest.left == 0
        await host.close()

    asyncio.run(run())


def test_who_was_claimed_goes_when_it_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        guest = Guest(tries=1)
        host = HostMemory(100, 0.0, ColdStates(tmp_path, 1 << 30), lambda: [guest])
        guest.claimed = True
        host.changed()
        await asyncio.sleep(0)
        guest.claimed = False
        host.changed()
        await asyncio.wait_for(guest.there.wait(), 30)
        await host.close()

    asyncio.run(run())
