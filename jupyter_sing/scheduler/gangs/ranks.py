"""Ranks of a job on fewer devices than ranks: how many devices suit, and which ranks share one.

Ranks that share a device are a *buddy interval*: 2^j consecutive ranks, beginning at a multiple of
2^j. So the ranks of two intervals join on one device when the job shrinks by half, and no rank
changes its company when it grows. A number of devices *suits* if every device but the last one gets
a full interval: four ranks suit 1, 2 and 4 devices, six ranks 1, 2, 3 and 6. With another number
the busiest device would have as many ranks as with the next smaller one that suits.
"""

from __future__ import annotations


def per_device(ranks: int, devices: int) -> int:
    """Return the length of the intervals: how many ranks the fullest device has."""
    length = 1
    while -(-ranks // length) > devices:
        length *= 2
    return min(length, ranks)


def sizes(ranks: int, least: int, most: int) -> tuple[int, ...]:
    """Return the numbers of devices that suit, in order, from `least` to `most`.

    If none of them suits, this is the largest one below that does: a job never holds devices
    without ranks.
    """
    found = set()
    length = 1
    while True:
        found.add(-(-ranks // length))
        if length >= ranks:
            break
        length *= 2
    suiting = [size for size in sorted(found) if size <= most]
    return tuple(size for size in suiting if size >= least) or (suiting[-1],)


def seat_of(rank: int, ranks: int, devices: int) -> int:
    """Return the index of the device on which a rank sits."""
    length = 1
    while -(-ranks // length) > devices:
        length *= 2
    return rank // length
