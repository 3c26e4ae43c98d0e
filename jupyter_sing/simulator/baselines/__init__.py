"""Baselines: schedulers in use today, with the engine's interface for the same simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.baselines.base import Baseline
from jupyter_sing.simulator.baselines.fcfs import Fcfs
from jupyter_sing.simulator.baselines.las import Las
from jupyter_sing.simulator.baselines.nvshare import Nvshare
from jupyter_sing.simulator.baselines.reservation import ReservationBaseline

CULL_SECONDS = 1800.0

BASELINES: Mapping[str, Callable[[Sequence[DeviceSpec]], Baseline]] = {
    "reserve": ReservationBaseline,
    "cull30": lambda devices: ReservationBaseline(devices, cull=CULL_SECONDS),
    "fcfs": Fcfs,
    "nvshare": Nvshare,
    "las": Las,
}

__all__ = ["BASELINES", "Baseline"]
