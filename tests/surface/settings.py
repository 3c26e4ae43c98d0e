"""Settings of torch that operators depend on: the device uses them."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.surface.checking import check, refused


@check
def the_default_dtype_decides_what_integers_become() -> None:
    x = torch.arange(4, device="cuda")
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            for made in (x / 2, x.sqrt(), torch.ones(2, device="cuda"), x.mean(dtype=dtype)):
                assert made.dtype == made.cpu().dtype == dtype
            assert (x / 3).tolist() == (x.cpu() / 3).tolist()
        finally:
            torch.set_default_dtype(torch.float32)


@check
def deterministic_algorithms_raise_and_fill_on_the_device() -> None:
    index, values = torch.tensor([1, 1], device="cuda"), torch.ones(2, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        assert (
            torch.empty_strided((2,), (1,), dtype=torch.int8, device="cuda").tolist() == [127] * 2
        )
        assert torch.zeros(2, device="cuda").resize_(4)[2:].isnan().all()
        text = refused(lambda: torch.zeros(4, device="cuda").put_(index, values).sum().item())
        assert "put_ does not have a deterministic implementation" in text
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.zeros(4, device="cuda").put_(index, values).sum().item() == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.zeros(4, device="cuda").put_(index, values).sum().item() == 1


@check
def precision_and_backends_can_be_set_in_old_and_new_ways() -> None:
    a = torch.ones(64, 64, device="cuda")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("medium", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert (a @ a).sum().item() == 64**3
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        cudnn: Any = torch.backends.cudnn
        cudnn.conv.fp32_precision = "tf32"
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
        assert (a @ a).sum().item() == 64**3
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision(before)
    with torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True):
        assert torch.conv1d(a[None], a[:, :, None]).sum().item() == 64**3
    mkldnn: Any = torch.backends.mkldnn
    mkldnn.enabled = False
    assert torch.conv1d(a[None], a[:, :, None]).sum().item() == 64**3
    mkldnn.enabled = True


@check
def attention_takes_the_kernels_that_are_allowed() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, 5, 8, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    found = attend(query, query, query)
    backend = torch.nn.attention.SDPBackend
    for allowed in (backend.MATH, [backend.FLASH_ATTENTION, backend.MATH]):
        with torch.nn.attention.sdpa_kernel(allowed):
            torch.testing.assert_close(attend(query, query, query), found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with torch.backends.cuda.sdp_kernel(enable_flash=False):
            torch.testing.assert_close(attend(query, query, query), found)
    assert torch.backends.cuda.flash_sdp_enabled()


@check
def libraries_may_be_preferred() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that it is experimental
        torch.backends.cuda.preferred_linalg_library("magma")
        torch.backends.cuda.preferred_linalg_library("cusolver")
        assert torch.linalg.det(torch.eye(3, device="cuda")).item() == 1
        torch.backends.cuda.preferred_linalg_library("default")


@check
def flushing_denormals_concerns_the_host_only() -> None:
    tiny = torch.tensor([1e-310], dtype=torch.float64, device="cuda")
    if torch.set_flush_denormal(True):
        try:
            assert (tiny * 1).cpu().view(torch.int64).item() != 0
        finally:
            torch.set_flush_denormal(False)
