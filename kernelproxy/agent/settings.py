"""What the daemon is told by its environment, as frozen values."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from kernelproxy.errors import ControlError

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Limits and times of the daemon.

    Parameters
    ----------
    idle_timeout : float
        Seconds without use after which a session is suspended; 0 or less: never.
    linger : float
        Seconds without sessions after which the daemon leaves.
    log_bytes : int
        Capacity of a session's log; memory is used only for what is in it.
    log_budget : int
        Bytes since the newest snapshot at which the next one begins.
    grant_step : int
        Device memory is granted to sessions in multiples of this, as long as there is room.
    order_seconds : float
        What a worker may take for an order that does not depend on the size of its state.
    snapshot_seconds : float
        What a worker may take for a snapshot or to start from one. It waits for the operator
        that is being executed, so this bounds the longest operator during which a session can
        be suspended by a snapshot; after that the worker is ended and the log replayed.
    zygote_seconds : float
        What an environment may take to import torch and, once, to build the native part.
    zygote_command : list of str
        What starts a zygote; the interpreter of the environment is put before it.
    """

    idle_timeout: float = 600.0
    linger: float = 300.0
    log_bytes: int = 512 * MIB
    log_budget: int = 256 * MIB
    grant_step: int = 64 * MIB
    order_seconds: float = 30.0
    snapshot_seconds: float = 300.0
    zygote_seconds: float = 900.0
    zygote_command: list[str] = field(default_factory=lambda: ["-m", "kernelproxy.zygote"])

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read ``JUPYTER_SING_IDLE_TIMEOUT`` and ``JUPYTER_SING_LINGER`` (seconds).

        Raises
        ------
        ControlError
            If one of them is no number.
        """
        return cls(
            idle_timeout=_seconds(environment, "JUPYTER_SING_IDLE_TIMEOUT", cls.idle_timeout),
            linger=_seconds(environment, "JUPYTER_SING_LINGER", cls.linger),
        )


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise ControlError(f"{name} is {text!r}: not a number of seconds.", "bad-request")
    return min(seconds, float(sys.maxsize))
