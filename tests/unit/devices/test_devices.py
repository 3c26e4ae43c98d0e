"""Parsing of JUPYTER_SING_DEVICES."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.units import parse_bytes
from kernelproxy.devices import DeviceKind, configured_devices

GIB = 1 << 30


class FakeNvml:
    """An NVML with two GPUs."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.open = 0
        self.part = -1  # of another GPU

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.count:
            raise self.NVMLError("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index >= self.count:
            raise self.NVMLError("no such GPU")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != "GPU-one":
            raise self.NVMLError("no such GPU")
        return 1

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"Fake {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=(handle + 1) * 16 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, handle

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:  # noqa: N802
        if handle == self.part:
            raise self.NVMLError("not supported")
        return handle + 4

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:  # noqa: N802
        return 132 * 128


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def no_gpu(nvml: FakeNvml) -> None:
    nvml.count = 0


@pytest.mark.usefixtures("no_gpu")
def test_without_gpus_there_are_two_software_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for text in (None, "auto", " "):
        devices = configured_devices(text)
        assert [each.id for each in devices] == ["cpu:0", "cpu:1"]
        assert {(each.memory_total, each.threads) for each in devices} == {(2 * GIB, 3)}


@pytest.mark.usefixtures("no_gpu")
def test_without_nvml_there_are_software_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert configured_devices("auto")[0].kind is DeviceKind.SOFTWARE


def test_auto_takes_all_gpus(nvml: FakeNvml) -> None:
    devices = configured_devices("auto")
    assert [(each.id, each.name, each.memory_total) for each in devices] == [
        ("cuda:0", "Fake 0", 16 * GIB - GIB),
        ("cuda:1", "Fake 1", 32 * GIB - GIB),
    ]
    assert devices[1].torch_device == "cuda:1"
    assert (devices[1].capability, devices[1].processors) == (901, 132)
    assert [each.node for each in devices] == ["/dev/nvidia4", "/dev/nvidia5"]
    assert nvml.open == 0


def test_a_part_of_a_gpu_has_no_file_of_its_own(nvml: FakeNvml) -> None:
    nvml.part = 1
    assert [each.node for each in configured_devices("auto")] == ["/dev/nvidia4", ""]


@pytest.mark.parametrize(("visible", "names"), [
    ("1", ["Fake 1"]),
    ("1,0", ["Fake 1", "Fake 0"]),
    ("GPU-one", ["Fake 1"]),
    ("0,7,1", ["Fake 0"]),
])  # fmt: skip
@pytest.mark.usefixtures("nvml")
def test_invisible_gpus_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices = configured_devices("auto")
    assert [each.name for each in devices] == names
    assert [each.id for each in devices] == [f"cuda:{i}" for i in range(len(names))]


@pytest.mark.usefixtures("nvml")
def test_a_list_is_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    devices = configured_devices("cpu:4GiB, cuda:1 ,cpu:512MiB@2")
    assert [each.id for each in devices] == ["cpu:0", "cuda:1", "cpu:1"]
    assert [each.threads for each in devices] == [5, 0, 2]
    assert devices[2].memory_total == 512 << 20
    assert devices[2].name == "Software device (2 CPU threads)"


@pytest.mark.usefixtures("nvml")
def test_a_part_of_a_gpu_is_left_to_contexts() -> None:
    totals = [each.memory_total for each in configured_devices("auto")]
    assert totals == [15 * GIB, 31 * GIB]
    assert configured_devices("cuda:1:768MiB")[0].memory_total == 768 << 20


def test_without_the_package_for_gpus_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="nvidia-ml-py"):
        configured_devices("cuda:0")


@pytest.mark.usefixtures("no_gpu")
def test_threads_default_to_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert configured_devices("cpu:1GiB")[0].threads == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu:0", "is not a device"),
        ("cpu", "is not a size"),
        ("cpu:", "is not a size"),
        ("cpu:4GiB@", "not a number of compute threads"),
        ("cpu:4GiB@0", "not a number of compute threads"),
        ("cpu:4GiB@two", "not a number of compute threads"),
        ("cpu:1KiB", "less than 1 MiB"),
        ("cpu:4GiB,", "is not a device"),
        ("cuda:x", "is not the number of a GPU"),
        ("cuda:2", r"no GPU cuda:2 on this machine \(2 visible\)"),
        ("cuda:2:1GiB", r"no GPU cuda:2 on this machine \(2 visible\)"),
        ("cuda:0:", "is not a size"),
        ("cuda:0:16GiB", "not between 1 MiB and the 15360 MiB that it may have"),
        ("cuda:0:1KiB", "not between 1 MiB and the 15360 MiB that it may have"),
        ("cuda:0,cuda:0", "names cuda:0 twice"),
    ],
)
@pytest.mark.usefixtures("nvml")
def test_nonsense_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        configured_devices(text)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"no GPU cuda:0 on this machine \(none found\)"):
        configured_devices("cuda:0")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("10B", 10),
        ("2KiB", 2048),
        ("2kb", 2000),
        ("1.5GiB", 3 << 29),
        ("4 GB", 4_000_000_000),
        ("3G", 3_000_000_000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1PiB", "1iB", "1 2", "nan"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)
