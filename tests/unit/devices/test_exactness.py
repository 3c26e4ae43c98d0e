"""Devices on which executing a log again gives the same bytes."""

from __future__ import annotations

from dataclasses import replace

from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices.device import Device

SOFTWARE = Device("cpu:0", DeviceKind.SOFTWARE, "Simulated GPU", 1 << 30, 2, "cpu")
GPU = Device("cuda:0", DeviceKind.CUDA, "NVIDIA H100", 1 << 30, 0, "cuda:0", 900, 132)


def test_software_devices_compute_alike_with_the_same_number_of_threads() -> None:
    assert SOFTWARE.computes_like(SOFTWARE)
    assert SOFTWARE.computes_like(replace(SOFTWARE, id="cpu:1"))
    assert not SOFTWARE.computes_like(replace(SOFTWARE, threads=4))


def test_gpus_do_not_compute_alike() -> None:
    assert not GPU.computes_like(GPU)
    assert not SOFTWARE.computes_like(GPU)
    assert not GPU.computes_like(SOFTWARE)
