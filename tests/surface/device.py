"""Properties of a program's device."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.surface.checking import check, refused

#: With the legacy types, which torch's annotations leave out.
CUDA: Any = torch.cuda


@check
def the_first_operator_may_be_any() -> None:
    assert torch.arange(6.0, device="cuda").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@check
def there_is_one_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.backends.cuda.is_built()
    assert not torch.backends.cudnn.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    with torch.cuda.device(0), torch.cuda.device("cuda:0"):
        torch.cuda.set_device(0)
    assert "one device" in refused(lambda: torch.cuda.set_device(1))


@check
def properties_tell_name_and_size() -> None:
    found = torch.cuda.get_device_properties(0)
    assert found.name == torch.cuda.get_device_name()
    assert found.total_memory == torch.cuda.mem_get_info()[1] == 2 << 30
    # That of a software device is 8.0.
    assert torch.cuda.get_device_capability() == (found.major, found.minor) >= (8, 0)
    assert torch.cuda.is_bf16_supported()
    assert found.name in repr(found)


@check
def the_default_device_can_be_the_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda
    finally:
        torch.set_default_device(None)


@check
def default_tensor_types_set_the_device_and_set_it_back() -> None:
    def made() -> tuple[torch.dtype, str]:
        new = torch.zeros(1)
        return new.dtype, new.device.type

    warnings.simplefilter("ignore", UserWarning)  # the function is deprecated
    try:
        torch.set_default_tensor_type(CUDA.DoubleTensor)
        assert made() == (torch.float64, "cuda")
        torch.set_default_tensor_type(torch.FloatTensor)
        assert made() == (torch.float32, "cpu")
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert made() == (torch.float32, "cuda")
        torch.set_default_device("cpu")  # comes before the type's
        assert made() == (torch.float32, "cpu")
        torch.set_default_device(None)
        assert made() == (torch.float32, "cuda")
        torch.set_default_tensor_type("torch.DoubleTensor")
        assert made() == (torch.float64, "cpu")
        torch.set_default_device("cuda")
        torch.set_default_tensor_type(torch.FloatTensor)
        assert made() == (torch.float32, "cuda")
    finally:
        torch.set_default_device(None)
        torch.set_default_tensor_type(torch.FloatTensor)
        warnings.simplefilter("error", UserWarning)


@check
def legacy_tensor_types() -> None:
    made = CUDA.FloatTensor([1, 2])
    assert isinstance(made, CUDA.FloatTensor)
    assert not isinstance(made, CUDA.LongTensor)
    assert not isinstance(made.cpu(), CUDA.FloatTensor)
    assert CUDA.LongTensor(2, 3).shape == (2, 3)
    assert made.type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type(CUDA.HalfTensor).dtype == torch.half
    assert torch.ones(2).type("torch.cuda.FloatTensor").is_cuda
