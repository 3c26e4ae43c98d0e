"""Steps: what the machine is, the build, and the first operators on the device."""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.daemon import session
from benchmarks.gpu import nvml
from benchmarks.gpu.judging import judged
from benchmarks.gpu.processes import FailedError, Suite, has_module
from benchmarks.rates import fresh_rate, memcpy_rate

MIB = 1 << 20
#: Facts of a bare process with plain torch, without any part of this project.
BARE = """
import json, sys, time
begin = time.perf_counter()
import torch
found = {"import torch, s": round(time.perf_counter() - begin, 2)}
found["torch"], found["python"] = torch.__version__, sys.version.split()[0]
found["CUDA"] = torch.version.cuda
if torch.cuda.is_available():
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    def used():
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used
    found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    before, begin = used(), time.perf_counter()
    x = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    found["context, s"] = round(time.perf_counter() - begin, 2)
    found["context, MiB"] = (used() - before) >> 20
    begin = time.perf_counter()
    torch.nn.functional.conv2d((x @ x)[None, None], torch.ones(1, 1, 3, 3, device="cuda"))
    torch.cuda.synchronize()
    found["first matmul and convolution, s"] = round(time.perf_counter() - begin, 2)
    found["with libraries, MiB"] = (used() - before) >> 20
    p = torch.cuda.get_device_properties(0)
    found["GPU"] = f"{p.name}, {p.total_memory >> 20} MiB, {p.major}.{p.minor}"
    found["compute mode"] = pynvml.nvmlDeviceGetComputeMode(handle)
    try:
        found["MIG"] = pynvml.nvmlDeviceGetMigMode(handle)[0]
    except pynvml.NVMLError as error:
        found["MIG"] = str(error)
print(json.dumps(found))
"""


def describe(suite: Suite) -> tuple[str, list[str], Any]:
    """Describe the machine, and the cost of a context and of copies with plain torch."""
    found = json.loads(suite.run(sys.executable, "-c", BARE).splitlines()[-1])
    if suite.gpu and "GPU" not in found:
        raise FailedError(f"torch {found['torch']} sees no GPU here: try --device cpu")
    found["cores"] = len(os.sched_getaffinity(0))
    found["memory, GiB"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    found["Python.h"] = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    found["g++"] = shutil.which("g++") is not None
    found["memcpy, GB/s"] = round(memcpy_rate(), 1)
    found["new shared memory, GB/s"] = round(fresh_rate(), 1)
    with suite.side(suite.environment(), proxied=False) as plain:
        rates = plain.order("copies", bytes=(16 if suite.small else 1024) * MIB)
    found |= {f"{name}, GB/s": round(rate, 1) for name, rate in rates.items()}
    table = ["| fact | |", "|---|---|", *(f"| {name} | {value} |" for name, value in found.items())]
    text = ", ".join(str(found[name]) for name in ("GPU", "torch", "driver") if name in found)
    return text or f"no GPU, torch {found['torch']}", table, found


def build(suite: Suite) -> str:
    """Compile the native part."""
    missing = [name for name in ("blake3", "zstandard", "yaml", "pynvml") if not has_module(name)]
    suite.run(sys.executable, "-m", "kernelproxy.native")
    return f"not installed here: {', '.join(missing)}" if missing else ""


def first_light(suite: Suite) -> str:
    """Execute the first operators; only the worker may use the GPU."""
    before = nvml.view() if suite.gpu else {}
    wrong = {}
    with (
        # A worker without a session would be another process on the GPU.
        suite.daemon(suite.devices(), JUPYTER_SING_CONTEXT_POOL="0") as env,
        suite.side(env, proxied=True) as proxied,
    ):
        seconds = proxied.order("touch")["seconds"]
        again = proxied.order("kernels")["seconds"]
        opened = proxied.order("driver")["open"]
        if opened:
            wrong["notebook"] = f"has the GPU open: {', '.join(opened)}"
        pid, worker = proxied.order("pid")["pid"], session("suite")["worker_pid"]
        text = f"first answer after {seconds:.2f} s, matmul and convolution {again:.2f} s"
        if suite.gpu:
            after = nvml.view()
            new = after["processes"].keys() - before["processes"].keys()
            if pid in new:
                wrong["notebook"] = "has a context"
            text += f"; NVML: {(after['used'] - before['used']) >> 20} MiB more"
            # In a container NVML reports the host's pids, or none: then the number must do.
            if len(new) != 1:
                wrong["processes"] = f"{len(new)} new ones use the GPU, not one"
            elif worker not in new:
                text += ", under another pid than the worker's here (a container)"
    return f"{text}; {judged(3, wrong)}"
