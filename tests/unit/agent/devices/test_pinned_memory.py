"""Messages to sessions that wait for memory which others keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.devices import Device, configured_devices

MIB = 1 << 20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:256MiB@1")
    (found,) = configured_devices()
    return found


def tenant(name: str, owner: int, kept: int) -> Any:
    return SimpleNamespace(id=name, name=name, owner=owner, kept=kept)


def test_names_are_shown_only_to_their_owner(device: Device) -> None:
    allocator = DeviceAllocator(device, MIB)
    for each in (tenant("mine.ipynb", 1, 64 * MIB), tenant("theirs.ipynb", 2, 128 * MIB)):
        allocator.tenants[each.id] = each
    text = allocator.kept_from(tenant("waits", 1, 0), 100 * MIB)
    assert "mine.ipynb" in text
    assert "another user" in text
    assert "theirs" not in text
    assert allocator.kept_from(tenant("waits", 1, 0), 64 * MIB) == ""
