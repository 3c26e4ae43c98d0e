"""Ways around the device proxy, tried in a program under a session.

Each way either computes right, or is refused with a sentence; a wrong number is the failure.
Prints one JSON object for each: its name, and an outcome ``right``, ``refused``, ``absent`` (the
library is not installed) or ``wrong``, with what was said.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

#: What a child process prints: whether torch, and the driver itself, find a GPU.
CHILD = """
import ctypes, json, torch
try:
    driver = ctypes.CDLL("libcuda.so.1").cuInit(0)
except OSError:
    driver = "no driver"
print(json.dumps([torch.cuda.is_available(), driver]))
"""


def torchvision_nms() -> bool:
    """Compare torchvision's compiled CUDA operator with its operator for the CPU."""
    from torchvision.ops import nms

    torch.manual_seed(0)
    corners = torch.rand(200, 2) * 100
    boxes = torch.cat([corners, corners + torch.rand(200, 2) * 30 + 1], 1)
    scores = torch.rand(200)
    found = nms(boxes.to("cuda"), scores.to("cuda"), 0.5).cpu()
    return torch.equal(found, nms(boxes, scores, 0.5))


def torchvision_align() -> bool:
    """The same with an operator that has a derivative."""
    from torchvision.ops import roi_align

    torch.manual_seed(0)
    x, boxes = torch.randn(1, 2, 16, 16), torch.tensor([[0.0, 1.0, 1.0, 9.0, 12.0]])
    found = roi_align(x.to("cuda"), boxes.to("cuda"), 4).cpu()
    return torch.allclose(found, roi_align(x, boxes, 4), atol=1e-5)


def triton_kernel() -> bool:
    """Start a kernel that is written by hand."""
    from benchmarks.gpu import triton_add

    x = torch.arange(1000.0, device="cuda")
    return torch.equal(triton_add.add(x, x).cpu(), torch.arange(1000.0) * 2)


def cupy_alone() -> bool:
    """Compute with CuPy, without a tensor of torch."""
    import cupy

    return float((cupy.arange(10) * 2).sum()) == 90.0


def cupy_on_tensor() -> bool:
    """Hand a tensor to CuPy."""
    import cupy

    return float(cupy.asarray(torch.arange(10.0, device="cuda")).sum()) == 45.0


def numba_on_tensor() -> bool:
    """Hand a tensor to numba."""
    from numba import cuda

    return float(cuda.as_cuda_array(torch.arange(10.0, device="cuda")).copy_to_host().sum()) == 45.0


def jax_on_tensor() -> bool:
    """Hand a tensor to JAX."""
    import jax

    return float(jax.dlpack.from_dlpack(torch.arange(10.0, device="cuda")).sum()) == 45.0


def driver_call() -> bool:
    """Open the GPU by the driver's own interface."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError("no driver is installed") from error
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value:
        return False
    raise RuntimeError(f"cuInit returns {status}, with {count.value} devices")


def child() -> bool:
    """Start a Python program from the notebook."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    return _without_gpu(json.loads(done.stdout.splitlines()[-1]))


def spawned() -> bool:
    """Start a process by multiprocessing."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return _without_gpu([pool.apply(torch.cuda.is_available), "not asked"])


def _without_gpu(found: list[Any]) -> bool:
    """Refuse if a child has no GPU, as documented; a GPU there is a way around."""
    available, driver = found
    if available or driver == 0:
        return False
    raise RuntimeError(f"no GPU in a child (cuInit returns {driver})")


WAYS: dict[str, tuple[str, Callable[[], bool]]] = {
    "torchvision nms": ("torchvision", torchvision_nms),
    "torchvision roi_align": ("torchvision", torchvision_align),
    "Triton kernel": ("triton", triton_kernel),
    "CuPy on a tensor": ("cupy", cupy_on_tensor),
    "CuPy alone": ("cupy", cupy_alone),
    "numba on a tensor": ("numba", numba_on_tensor),
    "JAX on a tensor": ("jax", jax_on_tensor),
    "cuInit": ("", driver_call),
    "a child": ("", child),
    "a spawned process": ("", spawned),
}


def attempt(module: str, way: Callable[[], bool]) -> tuple[str, str]:
    """Try a way; return its outcome and what was said."""
    if module and importlib.util.find_spec(module) is None:
        return "absent", ""
    try:
        return ("right" if way() else "wrong"), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return "refused", f"{type(error).__name__}: {lines[0]}"[:300]


def main() -> None:
    kept = torch.arange(9.0, device="cuda")
    for name, (module, way) in WAYS.items():
        outcome, said = attempt(module, way)
        print(json.dumps({"name": name, "outcome": outcome, "said": said}), flush=True)
    intact = kept.tolist() == [float(i) for i in range(9)]
    outcome = "right" if intact else "wrong"
    print(json.dumps({"name": "tensors after all of it", "outcome": outcome, "said": ""}))


if __name__ == "__main__":
    main()
