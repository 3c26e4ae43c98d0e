"""Numbers of the policy, as the engine uses them: frozen and typed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Tier(StrEnum):
    """Tier of a session: sets which fraction of its device time demand it is promised."""

    PREMIUM = "premium"
    STANDARD = "standard"
    BASIC = "basic"


TARGETS: Mapping[Tier, float] = {Tier.PREMIUM: 0.95, Tier.STANDARD: 0.70, Tier.BASIC: 0.0}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device, as the engine sees it.

    `node` is its host; `kind` distinguishes unequal devices. A switch to it takes `constant_seconds
    + bytes / bytes_per_second`, until it is measured.
    """

    id: str
    memory: int
    node: str = "node0"
    kind: str = "gpu"
    bytes_per_second: float = 20e9
    constant_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of all sessions of a user or virtual cluster together; `math.inf`: unlimited.

    Attributes
    ----------
    devices
        Held at once; 0: no device may be used.
    device_memory
        Bytes on devices.
    gpu_seconds_per_day
        Device time in any 24 hours.
    """

    devices: float = math.inf
    device_memory: float = math.inf
    gpu_seconds_per_day: float = math.inf


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an administrator, in seconds and bytes; the defaults are the recommended policy.

    Attributes
    ----------
    quanta, levels
        Quantum per feedback level in seconds, and the attained seconds of a cell at which each
        level but the last ends.
    throttle
        Seconds of weighted service that a tenant may be ahead of the virtual time before all others
        are served first.
    vc_weights, user_weights
        Shares; 1 for those not named. Users are named `(vc, user)`.
    vc_limits, user_limits
        Limits; none for those not named.
    targets
        By tier, the least fraction of its device time demand that a session gets.
    max_hold
        By tier, seconds of a lease after which a session gives way to any waiting session.
    host_memory
        Bytes of suspended sessions per node; what does not fit is spilled to disk.
    run_min
        Minimum run time: seconds that a lease runs at least, once it has started.
    run_min_switches
        Minimum run time at the lower levels, in multiples of the switch that the lease has cost.
    turn_switches
        Minimum quantum, in multiples of the switch that it has cost; 0: only `quanta` counts.
    move_lag
        Seconds of weighted service that a long cell has to be behind the session that executes on
        another device before it preempts that one; until then it takes turns on its home device.
    swap_share
        Share of a device's time that switches may take before its quanta are doubled.
    duty
        Share of the time in which a session is expected to use its devices: for admission.
    burst
        Seconds of interactive service (levels 0 and 1) that a user may have beyond the throttle.
    packing
        True if sessions may share a device at the same time, if their users permit it.
    compare_after
        Seconds after which service is compared again while a session waits: the order of tags may
        have changed.
    nadir_wait
        Seconds that a preemption may wait for the memory nadir of a step.
    grow_after
        Seconds that a device has to be idle, and no session that could use it waits, before a gang
        grows onto it; 0: at once, `math.inf`: never.
    """

    quanta: tuple[float, ...] = (2.0, 10.0, 60.0, 300.0)
    levels: tuple[float, ...] = (2.0, 12.0, 72.0)
    throttle: float = 10.0
    vc_weights: Mapping[str, float] = field(default_factory=dict)
    user_weights: Mapping[tuple[str, str], float] = field(default_factory=dict)
    vc_limits: Mapping[str, QuotaLimits] = field(default_factory=dict)
    user_limits: Mapping[tuple[str, str], QuotaLimits] = field(default_factory=dict)
    targets: Mapping[Tier, float] = field(default_factory=lambda: dict(TARGETS))
    max_hold: Mapping[Tier, float] = field(default_factory=dict)
    host_memory: int = 1 << 50
    run_min: float = 1.0
    run_min_switches: float = 15.0
    turn_switches: float = 0.0
    move_lag: float = 120.0
    swap_share: float = 0.05
    duty: float = 0.05
    burst: float = 120.0
    packing: bool = True
    compare_after: float = 10.0
    nadir_wait: float = 1.0
    grow_after: float = 30.0
