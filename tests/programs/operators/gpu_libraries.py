"""Run each check of a library that uses GPUs itself, and print a line of JSON for each.

Each computes what it computes on the CPU, or is refused. No check may give another number.
"""

from __future__ import annotations

import importlib.util
import json
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.surface.checking import CHECKS, check, refused

#: Attributes of this module are types and functions of libraries without annotations.
Untyped = Any


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def used(name: str) -> Untyped:
    return importlib.import_module(name)


def vector() -> torch.Tensor:
    return torch.arange(6.0, device="cuda")


def result_or_text(function: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    """Return a result, on the host, or the text of the error that is raised instead."""
    try:
        return function().cpu()
    except RuntimeError as error:
        return str(error)


@check
def bitsandbytes_quantizes() -> None:
    functional = used("bitsandbytes.functional")
    weights = torch.linspace(-2, 3, 128 * 64).reshape(128, 64)

    def restored(device: str) -> torch.Tensor:
        packed, state = functional.quantize_4bit(weights.to(device))
        found: torch.Tensor = functional.dequantize_4bit(packed, state)
        return found.cpu()

    assert torch.equal(restored("cuda"), restored("cpu"))


@check
def bitsandbytes_trains() -> None:
    optim = used("bitsandbytes.optim")

    def trained(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64).to(device)
        optimizer = optim.Adam8bit(model.parameters(), lr=0.01, min_8bit_size=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.linspace(0, 1, 64, device=device)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().cpu()

    assert torch.equal(trained("cuda"), trained("cpu"))


@check
def cupy_finds_no_gpu() -> None:
    cupy, x = used("cupy"), vector()
    for convert in (cupy.asarray, cupy.array, cupy.from_dlpack):
        refused(lambda convert=convert: convert(x), Exception)  # type: ignore[misc]
    refused(lambda: cupy.zeros(3), cupy.cuda.runtime.CUDARuntimeError)

    def at_its_address() -> Untyped:
        memory = cupy.cuda.UnownedMemory(x.data_ptr(), 24, x)
        return cupy.ndarray((6,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0)).sum()

    def kernel() -> None:
        code = 'extern "C" __global__ void first(float* to) { to[0] = 7; }'
        cupy.RawKernel(code, "first")((1,), (1,), (x.data_ptr(),))

    refused(at_its_address, Exception)
    refused(kernel, Exception)
    assert x.sum().item() == 15


@check
def flash_attn_double_is_stopped() -> None:
    """Of a package that is not built without NVIDIA's compiler."""
    attend, extension = used("flash_attn_double").flash_attn_func, used("flash_attn_2_cuda")
    host = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    query = host.cuda()
    for call in (
        lambda: attend(query, query, query),
        lambda: attend(query.requires_grad_(), query, query),
        lambda: torch.compile(attend)(query, query, query),
        lambda: extension.fwd(query, query, query),
    ):
        text = refused(call)
        assert "reads or writes the memory of a CUDA tensor itself" in text, text
    assert torch.equal(query.detach().cpu(), host)


@check
def jax_gets_no_address() -> None:
    jax, x = used("jax"), vector()
    refused(lambda: jax.dlpack.from_dlpack(x), Exception)
    refused(lambda: jax.numpy.asarray(x), Exception)
    refused(lambda: jax.device_put(x), Exception)
    assert {each.platform for each in jax.devices()} == {"cpu"}
    # What passes through host memory is right.
    assert jax.numpy.asarray(x.cpu().numpy()).sum() == 15
    host = torch.utils.dlpack.from_dlpack(jax.numpy.arange(3.0))
    assert (host.cuda() * 2).tolist() == [0, 2, 4]


@check
def numba_finds_no_gpu() -> None:
    cuda, x = used("numba.cuda"), vector()
    assert not cuda.is_available()
    refused(lambda: cuda.as_cuda_array(x), TypeError)
    refused(lambda: cuda.to_device([1.0]), Exception)
    kernel = cuda.jit(lambda to: None)
    refused(lambda: kernel[1, 1](x), Exception)
    assert x.sum().item() == 15


@check
def torch_geometric_aggregates() -> None:
    utils = used("torch_geometric.utils")
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    for reduce in ("sum", "mean", "max", "mul"):
        expected = utils.scatter(vector().cpu(), index, reduce=reduce)
        assert torch.equal(utils.scatter(vector(), index.cuda(), reduce=reduce).cpu(), expected)


@check
def torch_scatter_aggregates_or_is_stopped() -> None:
    scatter, index = used("torch_scatter").scatter, torch.tensor([0, 0, 1, 1, 2, 2])
    for reduce in ("sum", "mean", "max", "min"):
        expected = scatter(vector().cpu(), index, reduce=reduce)
        found = result_or_text(lambda reduce=reduce: scatter(vector(), index.cuda(), reduce=reduce))  # type: ignore[misc]
        if isinstance(found, str):
            assert "CUDA" in found
        else:
            assert torch.equal(found, expected)


@check
def triton_kernels_are_stopped() -> None:
    triton = used("triton")
    source = triton.language

    def double(a: Untyped, b: Untyped, count: Untyped, block: Untyped) -> None:
        place = source.program_id(0) * block + source.arange(0, block)
        inside = place < count
        source.store(b + place, source.load(a + place, mask=inside) * 2, mask=inside)

    double.__globals__["source"] = source
    double.__annotations__["block"] = source.constexpr
    kernel, x = triton.jit(double), vector()
    tuned = triton.autotune([triton.Config({"block": 8})], key=["count"])(kernel)

    def compiled(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        kernel[(1,)](x, result, 6, block=8)
        return result + 1

    for launch in (
        lambda: kernel[(1,)](x, torch.empty_like(x), 6, block=8),
        lambda: kernel.warmup(x, x, 6, block=8, grid=(1,)),
        lambda: tuned[(1,)](x, torch.empty_like(x), 6),
        lambda: torch.compile(compiled)(x),
    ):
        text = refused(launch)
        assert text.startswith("This kernel is written in Triton, which jupyter_sing cannot run")
    # Those that torch.compile makes run in the worker.
    assert torch.compile(lambda x: x.square().sum())(x).item() == 55


@check
def xformers_attends_or_is_refused() -> None:
    attend = used("xformers.ops").memory_efficient_attention
    query = torch.randn(1, 8, 2, 16)
    heads = query.transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    found = result_or_text(lambda: attend(*[query.cuda()] * 3))
    if isinstance(found, str):
        assert "No operator found" in found
    else:
        torch.testing.assert_close(found.transpose(1, 2), expected)


def run(function: Callable[[], None]) -> None:
    name = function.__name__
    library = next(each for each in LIBRARIES if name.startswith(each))
    if not has(library):
        return
    try:
        function()
        error = ""
    except Exception:
        error = traceback.format_exc()
    print(json.dumps({"name": name, "error": error}), flush=True)


LIBRARIES = (
    "bitsandbytes", "cupy", "flash_attn_double", "jax", "numba", "torch_geometric", "torch_scatter",
    "triton", "xformers",
)  # fmt: skip

if __name__ == "__main__":
    assert torch.zeros(1, device="cuda").is_cuda
    for each in CHECKS:
        run(each)
