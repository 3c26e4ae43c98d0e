"""Launchers of processes of which each uses a device of its own.

A process that a notebook starts gets a session of its own, so that there are as many ranks as a
program asks for, whatever number of devices the notebook sees.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kernelproxy.kernel.activation.state import RANKS_VARIABLE, ranks


def install(watch: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Called before torch is imported; `watch` runs a function after a module's import."""
    for package in ("lightning.fabric", "lightning_fabric"):
        watch(f"{package}.utilities.device_parser", accept_any_count)
    watch("torch.multiprocessing.spawn", count_processes)


def count_processes(module: ModuleType) -> None:
    """Let each process that torch starts see as many devices as there are such processes.

    Parameters
    ----------
    module : module
        ``torch.multiprocessing.spawn``.
    """
    original = module.start_processes
    signature = inspect.signature(original)

    @functools.wraps(original)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        join, call.arguments["join"] = call.arguments["join"], False
        with _ranks(call.arguments["nprocs"]):
            context = original(*call.args, **call.kwargs)
        if not join:
            return context
        while not context.join():
            pass
        return None

    module.start_processes = start_processes  # type: ignore[attr-defined]


@contextlib.contextmanager
def _ranks(count: int) -> Iterator[None]:
    """Set the number of devices that processes see which are started in this context."""
    before = os.environ.get(RANKS_VARIABLE)
    os.environ[RANKS_VARIABLE] = str(max(count, ranks()))
    try:
        yield
    finally:
        if before is None:
            del os.environ[RANKS_VARIABLE]
        else:
            os.environ[RANKS_VARIABLE] = before


def accept_any_count(module: ModuleType) -> None:
    """Make Lightning accept ``devices=4``, as each index is a label of a session's device.

    Parameters
    ----------
    module : module
        Lightning's ``utilities.device_parser``.
    """
    original = module._sanitize_gpu_ids

    @functools.wraps(original)
    def sanitize(
        gpus: list[int], include_cuda: bool = False, include_mps: bool = False
    ) -> list[int]:
        if include_cuda:
            return gpus
        found: list[int] = original(gpus, include_cuda=include_cuda, include_mps=include_mps)
        return found

    module._sanitize_gpu_ids = sanitize  # type: ignore[attr-defined]
