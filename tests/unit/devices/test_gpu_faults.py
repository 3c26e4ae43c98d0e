"""Faults of GPUs, as NVML reports them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kernelproxy.common.errors import DeviceError
from kernelproxy.devices import cuda


class FaultyNvml:
    """An NVML with one GPU and one instance of it in MIG mode, and scripted answers."""

    NVML_ERROR_NOT_FOUND, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 6, 15, 16
    NOT_SUPPORTED, TIMEOUT = 3, 10

    class NVMLError(Exception):
        """As that of pynvml."""

        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.rows = (0, 0, 0, 0)
        self.pending = 0

    def answer(self, name: str, found: object) -> object:
        if name in self.errors:
            raise self.NVMLError(self.errors[name])
        return found

    def nvmlInit(self) -> None:  # noqa: N802
        self.answer("init", None)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        return self.answer("handle", uuid)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> object:  # noqa: N802
        if not handle.startswith("MIG"):
            raise self.NVMLError(self.NOT_SUPPORTED)
        return "GPU-1"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> object:  # noqa: N802
        assert handle == "GPU-1"
        return self.answer("memory", SimpleNamespace(total=1))

    def nvmlDeviceGetRemappedRows(self, handle: str) -> object:  # noqa: N802
        return self.answer("rows", self.rows)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: str) -> object:  # noqa: N802
        return self.answer("pages", self.pending)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FaultyNvml:
    faulty = FaultyNvml()
    monkeypatch.setitem(sys.modules, "pynvml", faulty)
    return faulty


@pytest.mark.parametrize("uuid", ["GPU-1", "MIG-1"])
def test_faults_of_a_gpu_are_also_those_of_its_instances(nvml: FaultyNvml, uuid: str) -> None:
    assert cuda.faults([uuid]) == {}
    nvml.rows = (2, 1, 1, 0)
    assert "a reset repairs" in cuda.faults([uuid])[uuid]
    nvml.rows = (2, 1, 1, 1)
    assert cuda.faults([uuid]) == {uuid: "its memory has errors that cannot be repaired"}


def test_an_old_gpu_reports_pages_instead_of_rows(nvml: FaultyNvml) -> None:
    nvml.errors = {"rows": nvml.NOT_SUPPORTED}
    assert cuda.faults(["GPU-1"]) == {}
    nvml.pending = 1
    assert "a reset repairs" in cuda.faults(["GPU-1"])["GPU-1"]
    nvml.errors["pages"] = nvml.NOT_SUPPORTED
    assert cuda.faults(["GPU-1"]) == {}


@pytest.mark.parametrize(
    ("call", "error", "fault"),
    [
        ("memory", FaultyNvml.NVML_ERROR_GPU_IS_LOST, "the driver has lost it"),
        ("handle", FaultyNvml.NVML_ERROR_NOT_FOUND, "the driver does not find it any more"),
        ("memory", FaultyNvml.NVML_ERROR_RESET_REQUIRED, "it has to be reset"),
        ("memory", FaultyNvml.TIMEOUT, ""),  # says nothing about the GPU
    ],
)
def test_a_gpu_that_is_lost_is_a_fault(nvml: FaultyNvml, call: str, error: int, fault: str) -> None:
    nvml.errors = {call: error}
    assert cuda.faults(["GPU-1"]).get("GPU-1", "").startswith(fault)
    assert bool(cuda.faults(["GPU-1"])) == bool(fault)


def test_a_driver_that_does_not_answer_reports_nothing_of_a_gpu(nvml: FaultyNvml) -> None:
    nvml.errors = {"init": nvml.TIMEOUT}
    with pytest.raises(DeviceError):
        cuda.faults(["GPU-1"])
