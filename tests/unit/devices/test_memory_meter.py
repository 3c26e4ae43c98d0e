"""The memory of a GPU by its driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kernelproxy.devices.memory_meter import MemorySample, NvmlMeter

MIB = 1 << 20


class MeasuringNvml:
    """An NVML with one GPU on which two programs compute, and one draws."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.open = self.opened = 0
        self.broken = self.secret = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("Driver/library version mismatch")
        self.open += 1
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if self.broken:
            raise self.NVMLError("Unknown error")
        return SimpleNamespace(total=100 * MIB, used=60 * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        if self.secret:
            raise self.NVMLError("no permission")
        return [SimpleNamespace(pid=7, usedGpuMemory=30 * MIB),
                SimpleNamespace(pid=8, usedGpuMemory=None)]  # fmt: skip

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=7, usedGpuMemory=30 * MIB),
                SimpleNamespace(pid=9, usedGpuMemory=10 * MIB)]  # fmt: skip


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> MeasuringNvml:
    fake = MeasuringNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_all_processes_are_measured_and_the_driver_is_opened_once(nvml: MeasuringNvml) -> None:
    meter = NvmlMeter("GPU-1")
    sample = MemorySample(100 * MIB, 60 * MIB, {7: 30 * MIB, 8: None, 9: 10 * MIB})
    assert [meter.measure(), meter.measure()] == [sample, sample]
    assert (nvml.open, nvml.opened) == (1, 1)


def test_processes_may_be_hidden(nvml: MeasuringNvml) -> None:
    nvml.secret = True
    found = NvmlMeter("GPU-1").measure()
    assert found is not None
    assert found.processes == {7: 30 * MIB, 9: 10 * MIB}


def test_a_driver_that_fails_is_opened_anew(
    nvml: MeasuringNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = NvmlMeter("GPU-1")
    assert meter.measure() is not None
    nvml.broken = True
    assert meter.measure() is None
    assert nvml.open == 0
    assert meter.measure() is None
    nvml.broken = False
    assert meter.measure() is not None
    assert NvmlMeter("GPU-2").measure() is None
    assert nvml.open == 1
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlMeter("GPU-1").measure() is None
