"""Parsing of JUPYTER_SING_DEVICES."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.units import parse_bytes
from kernelproxy.devices import DeviceKind, configured_devices, cuda

GIB = 1 << 30


class FakeNvml:
    """An NVML with two GPUs."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.open = 0
        self.unnumbered = -1  # a GPU that has no device file
        self.instances: dict[int, list[str]] = {}  # by GPU in MIG mode
        self.mode = 0

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

    def nvmlDeviceGetUUID(self, handle: int | str) -> str | bytes:  # noqa: N802
        return handle if isinstance(handle, str) else ("GPU-8932f937", b"GPU-89aa0001")[handle]

    def nvmlDeviceGetName(self, handle: int | str) -> str:  # noqa: N802
        return f"Fake {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int | str) -> SimpleNamespace:  # noqa: N802
        whole = (handle + 1) * 16 * GIB if isinstance(handle, int) else 10 * GIB
        return SimpleNamespace(total=whole)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int | str) -> tuple[int, int]:  # noqa: N802
        if isinstance(handle, str):
            raise self.NVMLError("not of a part")
        return 9, handle

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:  # noqa: N802
        return self.mode

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if self.instances:
            return int(handle in self.instances), 0
        raise self.NVMLError("not supported")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> str:  # noqa: N802
        if number >= len(self.instances[handle]):
            raise self.NVMLError("not found")
        return self.instances[handle][number]

    def nvmlDeviceGetAttributes(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(multiprocessorCount=14)

    def nvmlDeviceGetMinorNumber(self, handle: int) -> int:  # noqa: N802
        if handle == self.unnumbered:
            raise self.NVMLError("not supported")
        return handle + 4

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:  # noqa: N802
        return 132 * 128


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda, "_has_gpu_file", lambda: fake.count > 0)
    return fake


@pytest.fixture
def no_gpu(nvml: FakeNvml) -> None:
    nvml.count = 0


@pytest.fixture
def silent_driver(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU whose driver does not answer, as after its update."""
    monkeypatch.setattr(cuda, "_has_gpu_file", lambda: True)


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
    # A worker sees its own GPU alone.
    assert [(each.torch_device, each.visible) for each in devices] == [
        ("cuda:0", "GPU-8932f937"),
        ("cuda:0", "GPU-89aa0001"),
    ]
    assert (devices[1].capability, devices[1].processors) == (901, 132)
    assert [each.node for each in devices] == ["/dev/nvidia4", "/dev/nvidia5"]
    assert nvml.open == 0


def test_a_gpu_may_have_no_file(nvml: FakeNvml) -> None:
    nvml.unnumbered = 1
    assert [each.node for each in configured_devices("auto")] == ["/dev/nvidia4", ""]


def test_the_parts_of_a_gpu_are_devices(nvml: FakeNvml) -> None:
    nvml.instances = {0: ["MIG-1111", "MIG-2222"]}
    devices = configured_devices("auto")
    assert [(each.id, each.visible, each.node) for each in devices] == [
        ("cuda:0", "MIG-1111", ""),
        ("cuda:1", "MIG-2222", ""),
        ("cuda:2", "GPU-89aa0001", "/dev/nvidia5"),
    ]
    part = devices[1]
    assert (part.name, part.memory_total) == ("Fake MIG-2222", 9 * GIB)
    assert (part.capability, part.processors) == (900, 14)
    assert configured_devices("cuda:1")[0].visible == "MIG-2222"


def test_a_gpu_in_mig_mode_without_parts_is_explained(nvml: FakeNvml) -> None:
    nvml.count, nvml.instances = 1, {0: []}
    with pytest.raises(DeviceError, match="its MIG mode is on and it has no instance"):
        configured_devices("auto")


@pytest.mark.parametrize("mode", ["Exclusive_Process", "Prohibited"])
@pytest.mark.parametrize("text", ["auto", "cuda:1"])
def test_a_gpu_for_one_process_is_refused(nvml: FakeNvml, mode: str, text: str) -> None:
    nvml.mode = {"Prohibited": 2, "Exclusive_Process": 3}[mode]
    with pytest.raises(DeviceError, match=rf"GPU cuda:\d is in compute mode {mode}"):
        configured_devices(text)


@pytest.mark.usefixtures("silent_driver")
def test_a_driver_that_does_not_answer_is_reported() -> None:
    with pytest.raises(DeviceError, match=r"has a GPU, but NVIDIA's driver does not answer: no dr"):
        configured_devices("auto")
    with pytest.raises(DeviceError, match=r"no GPU cuda:0 on this machine \(NVIDIA's driver does"):
        configured_devices("cuda:0")
    assert configured_devices("cpu:1GiB")[0].kind is DeviceKind.SOFTWARE


@pytest.mark.usefixtures("silent_driver")
def test_a_gpu_without_the_package_that_finds_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match=r"nvidia-ml-py, which finds GPUs, is not inst.*cpu:"):
        configured_devices("auto")


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize("visible", ["", "-1", "none", "void", "NoDevFiles"])
def test_hidden_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {each.kind for each in configured_devices("auto")} == {DeviceKind.SOFTWARE}


@pytest.mark.usefixtures("silent_driver")
def test_hidden_gpus_need_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert configured_devices("auto")[0].kind is DeviceKind.SOFTWARE


@pytest.mark.parametrize("text", ["auto", "cuda:0"])
def test_a_gpu_that_is_lost_is_reported(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def lost(handle: int) -> str:
        raise nvml.NVMLError("GPU is lost")

    monkeypatch.setattr(nvml, "nvmlDeviceGetUUID", lost)
    with pytest.raises(DeviceError, match="driver cannot describe a GPU: GPU is lost"):
        configured_devices(text)
    assert nvml.open == 0


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize("visible", ["7", "GPU-89", "GPU-0000", "MIG-1111"])
def test_a_name_of_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={visible} names no GPU"):
        configured_devices("auto")


@pytest.mark.parametrize(("visible", "found"), [
    ("0", ["MIG-1111"]),
    ("GPU-893", ["MIG-1111"]),
    ("MIG-2222,1", ["MIG-2222", "GPU-89aa0001"]),
])  # fmt: skip
def test_parts_are_visible_by_name(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, found: list[str]
) -> None:
    nvml.instances = {0: ["MIG-1111", "MIG-2222"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [each.visible for each in configured_devices("auto")] == found


@pytest.mark.parametrize(("visible", "names"), [
    ("1", ["Fake 1"]),
    ("1,0", ["Fake 1", "Fake 0"]),
    ("GPU-89aa0001", ["Fake 1"]),
    ("GPU-89a", ["Fake 1"]),
    ("0,7,1", ["Fake 0"]),
    ("1,1,0", ["Fake 1"]),
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
