"""Health of devices: out of use by NVML's word, and by what workers report."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.devices.device_health import LOSS_SECONDS, POLL_SECONDS, DeviceHealth
from kernelproxy.common.errors import DeviceError
from kernelproxy.common.protocol import DeviceLost
from kernelproxy.devices import configured_devices

ASSERTED = DeviceLost(710, "CUDA error: device-side assert triggered", "aten::add")
UNCORRECTABLE = DeviceLost(214, "CUDA error: uncorrectable ECC error encountered", "")


class TwoDevices:
    """Two GPUs, what NVML reports of them, and what follows."""

    def __init__(self) -> None:
        (device,) = configured_devices("cpu:1GiB")
        gpus = [replace(device, id=f"cuda:{number}", visible=f"GPU-{number}") for number in (0, 1)]
        self.allocators = {each.id: DeviceAllocator(each, 1 << 20) for each in gpus}
        self.first, self.second = self.allocators.values()
        self.now = 0.0
        self.faults: dict[str, str] = {}
        self.happened: list[str] = []
        self.health = DeviceHealth(
            self.allocators,
            lambda each: self.happened.append(f"{each.device.id} failed"),
            lambda each: self.happened.append(f"{each.device.id} healed"),
            self.report,
            lambda: self.now,
        )

    def report(self, uuids: list[str]) -> dict[str, str]:
        assert uuids == ["GPU-0", "GPU-1"]
        if "driver" in self.faults:
            raise DeviceError(self.faults["driver"])
        return self.faults

    def lose(self, party: str, lost: DeviceLost = UNCORRECTABLE) -> None:
        self.first.on_loss(self.first, party, lost)

    def check(self) -> None:
        asyncio.run(self.health.check())


def test_a_gpu_is_out_of_use_while_nvml_reports_a_fault() -> None:
    host = TwoDevices()
    host.check()
    assert host.happened == []
    host.faults = {"GPU-1": "the driver has lost it"}
    for _ in range(2):
        host.check()
    assert host.happened == ["cuda:1 failed"]
    assert (host.first.failure, host.second.failure) == (
        "",
        "GPU 1 is out of use: the driver has lost it.",
    )
    host.faults = {"driver": "it does not answer"}
    with pytest.raises(DeviceError):
        host.check()
    assert host.second.failure
    host.faults = {}
    host.check()
    assert host.happened == ["cuda:1 failed", "cuda:1 healed"]
    assert not host.second.failure


def test_a_device_that_several_sessions_have_lost_is_out_of_use() -> None:
    host = TwoDevices()
    for party in ("one", "one", "two", "three"):
        host.lose(party)
    assert host.happened == ["cuda:0 failed"]
    assert host.first.failure == (
        "GPU 0 is out of use: several sessions have lost it"
        " (CUDA error: uncorrectable ECC error encountered)."
    )
    host.check()  # NVML has found nothing, which proves nothing
    assert host.first.failure


def test_faults_of_programs_and_losses_of_one_session_are_no_sign_of_a_bad_device() -> None:
    host = TwoDevices()
    for _ in range(5):
        host.lose("one")
        host.lose("two", ASSERTED)
        host.lose("three", ASSERTED)
    assert host.happened == []


def test_losses_with_a_long_time_between_are_no_sign_of_a_bad_device() -> None:
    host = TwoDevices()
    host.lose("one")
    host.now = LOSS_SECONDS + 1
    host.lose("two")
    assert host.happened == []


def test_a_loss_during_a_check_is_followed_by_another_check() -> None:
    async def checked_twice() -> None:
        loop, twice = asyncio.get_running_loop(), asyncio.Event()
        asked: list[list[str]] = []
        lost = threading.Event()

        def lose() -> None:
            host.lose("ada")
            lost.set()

        def ask(uuids: list[str]) -> dict[str, str]:
            asked.append(uuids)
            if len(asked) == 1:
                loop.call_soon_threadsafe(lose)
                lost.wait()
            else:
                loop.call_soon_threadsafe(twice.set)
            return {}

        health = DeviceHealth(host.allocators, lambda _: None, lambda _: None, ask)
        health.begin()
        async with asyncio.timeout(POLL_SECONDS / 2):
            await twice.wait()
        await health.close()

    host = TwoDevices()
    asyncio.run(checked_twice())
