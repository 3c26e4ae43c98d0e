"""Who goes to disk when the states of suspended sessions outgrow host memory. Pure.

A session's state is *resident* in device memory, *parked* in host memory, or *cold* on disk. What
is least likely to be used soon goes first; as far as anybody can tell, that is what was not used
for longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parked:
    """A session whose state could go to disk.

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


def choose_cold(parked: Sequence[Parked], excess: int, now: float, cold_after: float) -> list[str]:
    """Choose the sessions that go to disk.

    Parameters
    ----------
    parked : sequence of Parked
    excess : int
        Bytes beyond the budget of host memory; 0 or less: none.
    now : float
        In seconds, of the clock of `used_at`.
    cold_after : float
        Seconds without use after which a state goes anyway; 0 or less: never.

    Returns
    -------
    list of str
        In the order in which they should go: the longest unused first. As many as the excess
        asks for, or all if that is not enough, and those that were unused for too long.
    """
    chosen: list[str] = []
    for each in sorted(parked, key=lambda each: (each.used_at, each.session)):
        stale = 0 < cold_after <= now - each.used_at
        if each.bytes <= 0 or (excess <= 0 and not stale):
            continue
        chosen.append(each.session)
        excess -= each.bytes
    return chosen


def seconds_to_next(parked: Sequence[Parked], now: float, cold_after: float) -> float:
    """Seconds until `choose_cold` should be asked again for age alone; infinite: never."""
    if cold_after <= 0:
        return float("inf")
    ages = [now - each.used_at for each in parked if each.bytes > 0]
    return max(0.0, cold_after - max(ages)) if ages else float("inf")
