"""Policy for spilling: which suspended states go to disk when host memory is short. Pure.

A session's state is *resident* in device memory, *suspended* in host memory (`SuspendedState`), or
*cold* on disk. The state that is least likely to be used soon is spilled first. The best estimate
of that is the one that was not used for longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SuspendedState:
    """A session whose state could be spilled.

    Parameters
    ----------
    session : str
    bytes : int
        Host memory that this would free.
    used_at : float
        When it was last used, in seconds of any one clock.
    """

    session: str
    bytes: int
    used_at: float


def choose_cold(
    parked: Sequence[SuspendedState], excess: int, now: float, cold_after: float
) -> list[str]:
    """Choose the sessions whose states are spilled.

    Parameters
    ----------
    parked : sequence of SuspendedState
    excess : int
        Bytes beyond the budget of host memory; 0 or less: none.
    now : float
        In seconds, of the clock of `used_at`.
    cold_after : float
        Seconds without use after which a state is spilled anyway; 0 or less: never.

    Returns
    -------
    list of str
        In the order in which they should be spilled: the longest unused first. As many as the
        excess requires, or all if that is not enough, and those that were unused for too long.
    """
    chosen: list[str] = []
    for each in sorted(parked, key=lambda each: (each.used_at, each.session)):
        stale = 0 < cold_after <= now - each.used_at
        if each.bytes <= 0 or (excess <= 0 and not stale):
            continue
        chosen.append(each.session)
        excess -= each.bytes
    return chosen


def seconds_to_next(parked: Sequence[SuspendedState], now: float, cold_after: float) -> float:
    """Return the seconds until `choose_cold` is due because of age alone; infinite: never."""
    if cold_after <= 0:
        return float("inf")
    ages = [now - each.used_at for each in parked if each.bytes > 0]
    return max(0.0, cold_after - max(ages)) if ages else float("inf")
