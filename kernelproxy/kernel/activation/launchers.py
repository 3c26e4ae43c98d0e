"""Launchers that count devices before they start processes for them.

A process that a notebook starts gets a session of its own, so that there are as many ranks as a
program asks for, whatever number of devices the notebook sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType


def install(watch: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Called before torch is imported; `watch` runs a function after a module's import."""
    for package in ("lightning.fabric", "lightning_fabric"):
        watch(f"{package}.utilities.device_parser", accept_any_count)


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
