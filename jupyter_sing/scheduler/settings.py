"""The numbers of the policy, as the engine uses them: frozen and typed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Tier(StrEnum):
    """What was promised to a session: a fraction of the device time that it asks for."""

    PREMIUM = "premium"
    STANDARD = "standard"
    BASIC = "basic"


TARGETS: Mapping[Tier, float] = {Tier.PREMIUM: 0.95, Tier.STANDARD: 0.70, Tier.BASIC: 0.0}


@dataclass(frozen=True, slots=True)
class Device:
    """One device as the engine sees it.

    `node` is the host that it is in; `kind` tells unequal ones apart. A switch to it takes
    `constant_seconds + bytes / bytes_per_second` until a measurement says otherwise.
    """

    id: str
    memory: int
    node: str = "node0"
    kind: str = "gpu"
    bytes_per_second: float = 20e9
    constant_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What somebody may have with all their sessions; `math.inf`: any number.

    Attributes
    ----------
    devices
        Held at once; 0: they may use none.
    device_memory
        Bytes on devices.
    gpu_seconds_per_day
        Device time in any 24 hours.
    """

    devices: float = math.inf
    device_memory: float = math.inf
    gpu_seconds_per_day: float = math.inf


@dataclass(frozen=True, slots=True)
class Settings:
    """What an administrator may set. Seconds and bytes; the defaults are the recommended policy.

    Attributes
    ----------
    quanta, levels
        Seconds of a turn per feedback level, and attained seconds of a cell at which each level
        but the last ends.
    throttle
        Seconds of weighted service that a tenant may be ahead of the virtual time before it stands
        behind all others.
    vc_weights, user_weights
        Shares; whoever is not named has 1. Users are named `(vc, user)`.
    vc_limits, user_limits
        What they may have; whoever is not named may have anything.
    targets
        Of the device time that it asks for, what a session gets at least, by tier: a fraction.
    max_hold
        Seconds of a lease after which a session of a tier gives way to whoever waits.
    host_memory
        Bytes of parked sessions per node; what does not fit goes to disk.
    run_min
        Seconds that a lease runs at least, once it has started.
    run_min_switches
        How many times the switch that it cost a lease runs at the lower levels before it can be
        taken away.
    turn_switches
        How many times the switch that it cost a turn lasts at least; 0: only `quanta` counts.
    move_lag
        Seconds of weighted service that a long cell has to be behind who executes on another
        device before it takes that one's place there: until then it takes turns at home.
    swap_share
        Share of a device's time that switches may take before quanta there are doubled.
    duty
        Share of the time in which a session is expected to use its devices: for admission.
    burst
        Seconds of interactive service (levels 0 and 1) that a user may have beyond the throttle.
    packing
        Whether sessions may share a device at once, if their users permit it.
    compare_after
        Seconds after which service is compared again while somebody waits: tags pass each other.
    nadir_wait
        Seconds that a preemption may wait for the memory nadir of a step.
    """

    quanta: tuple[float, ...] = (2.0, 10.0, 60.0, 300.0)
    levels: tuple[float, ...] = (2.0, 12.0, 72.0)
    throttle: float = 10.0
    vc_weights: Mapping[str, float] = field(default_factory=dict)
    user_weights: Mapping[tuple[str, str], float] = field(default_factory=dict)
    vc_limits: Mapping[str, Limits] = field(default_factory=dict)
    user_limits: Mapping[tuple[str, str], Limits] = field(default_factory=dict)
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
