"""Settings of the daemon, read from its environment, as frozen values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kernelproxy.agent.control_groups import memory_limit
from kernelproxy.common import options
from kernelproxy.common.options import Reader, options_of
from kernelproxy.common.units import MIB


@dataclass(frozen=True)
class AgentSettings:
    """Limits and timeouts of the daemon.

    Parameters
    ----------
    idle_timeout : float
        Seconds without use after which a session is suspended; 0 or less: never.
    linger : float
        Seconds without sessions after which the daemon exits.
    log_bytes : int
        Capacity of a session's log; only its contents take memory.
    log_budget : int
        Bytes since the newest snapshot at which the next snapshot begins.
    grant_step : int
        Device memory is granted to sessions in multiples of this, as long as there is room; on
        small devices in multiples of a quarter of their memory, so that more than one session
        fits.
    order_seconds : float
        Time limit for a worker's command whose cost does not depend on the size of its state.
    still_seconds, busy_seconds : float
        How long a worker may keep others waiting before it is ended: while it does nothing, and
        while it works; see Note [Patience].
    snapshot_seconds : float
        Time limit for a worker to take a snapshot or to start from one. The snapshot waits for
        the operator that is executing. So this bounds the longest operator during which a session
        can be suspended by a snapshot; after that the worker is ended and the log replayed.
    host_memory : int
        Bytes of host memory for logs and for the states of suspended sessions; beyond it, the
        least recently used states are spilled. 0: half of what the machine, or its container,
        has, which may change.
    cold_after : float
        Seconds without use after which a suspended state is spilled; 0 or less: never because of
        time.
    disk_quota : int
        Bytes that states, checkpoints and hibernating kernels may take on disk; 0 or less: nothing
        is written to disk.
    context_pool : bool
        True if a GPU has a context in advance.
    seats : bool
        True if the ranks of a job on one software device share a process, see
        `kernelproxy.agent.workers.seats`.
    stop_seconds : float
        How long the daemon waits at shutdown for a busy notebook, to save it.
    zygote_seconds : float
        Time limit for an environment to import torch and, once, to build the native part.
    zygote_command : list of str
        Command that starts a zygote; the interpreter of the environment is prepended.
    system : bool
        True if the daemon runs as root and serves all users of the machine.
    deterministic : bool
        Whether the workers of new sessions use deterministic algorithms.
    """

    idle_timeout: float = options.IDLE_TIMEOUT.default
    linger: float = options.LINGER.default
    log_bytes: int = 512 * MIB
    log_budget: int = 256 * MIB
    grant_step: int = 64 * MIB
    order_seconds: float = 30.0
    still_seconds: float = 5.0
    busy_seconds: float = 120.0
    snapshot_seconds: float = 300.0
    host_memory: int = 0
    cold_after: float = options.COLD_AFTER.default
    disk_quota: int = options.DISK_QUOTA.default
    context_pool: bool = options.CONTEXT_POOL.default
    seats: bool = options.SEATS.default
    stop_seconds: float = 30.0
    zygote_seconds: float = 900.0
    zygote_command: list[str] = field(default_factory=lambda: ["-m", "kernelproxy.worker.zygote"])
    system: bool = False
    deterministic: bool = options.DETERMINISTIC.default

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AgentSettings:
        """Read the daemon's options that are fields of these settings.

        Raises
        ------
        ControlError
            If the value of one of them is not allowed.
        """
        names = {each.name for each in fields(cls)}
        given = (
            each
            for each in options_of(Reader.DAEMON)
            if each.name in names and each.text(environment) is not None
        )
        return cls(**{each.name: each.read(environment) for each in given})

    def host_budget(self) -> int:
        """Return the bytes of host memory for logs and suspended states, as of now."""
        return self.host_memory or _physical_memory() // 2

    def step_of(self, memory: int) -> int:
        """Return the granularity of grants, in bytes, on a device with `memory` bytes."""
        return min(self.grant_step, max(MIB, memory // 4))


def _physical_memory() -> int:
    """Return the bytes of the machine's memory, or of the part that its container may use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return machine if limit is None else min(machine, limit)
