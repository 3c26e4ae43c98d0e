"""Distributions given by a few published quantiles, and samples of them that keep to the quantiles.

A sample is stratified: of n values, one falls into each n-th of the distribution, in an order drawn
by the seed. Its quantiles, and sums over it, are then those of the distribution and not luck, which
matters where one value in a thousand lasts a day.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import NormalDist

_STANDARD = NormalDist()


@dataclass(frozen=True)
class Quantiles:
    """A distribution that is log-linear between known quantiles.

    Parameters
    ----------
    knots : tuple of (float, float)
        Probability and value, both increasing, from probability 0 to 1; values are positive.
    """

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        pairs = pairwise(self.knots)
        rising = all(p < q and 0 < v <= w for (p, v), (q, w) in pairs)
        if not rising or self.knots[0][0] != 0 or self.knots[-1][0] != 1:
            raise ValueError("Quantiles must rise, from probability 0 to 1.")

    def value(self, probability: float) -> float:
        """Return the value below which this share of the distribution lies."""
        index = bisect_right(self.knots, probability, key=lambda knot: knot[0]) - 1
        if index >= len(self.knots) - 1:
            return self.knots[-1][1]
        (p, v), (q, w) = self.knots[index], self.knots[index + 1]
        return float(v * (w / v) ** ((probability - p) / (q - p)))

    def mean(self) -> float:
        """Return the mean, exactly: between knots the integral of an exponential."""
        total = 0.0
        for (p, v), (q, w) in pairwise(self.knots):
            total += (q - p) * (v if v == w else (w - v) / math.log(w / v))
        return total


def lognormal(median: float, sigma: float) -> Callable[[float], float]:
    """Return the quantile function of a lognormal distribution."""
    return lambda probability: median * math.exp(sigma * _STANDARD.inv_cdf(probability))


def lognormal_of(mean: float, deviation: float) -> Callable[[float], float]:
    """Return the quantile function of the lognormal distribution of this mean and deviation."""
    variance = math.log1p((deviation / mean) ** 2)
    return lognormal(mean * math.exp(-variance / 2), math.sqrt(variance))


def sample(value: Callable[[float], float], count: int, random: Random) -> list[float]:
    """Draw `count` values of the distribution with this quantile function, one per stratum."""
    values = [value(position) for position in strata(count, random)]
    shuffle(values, random)
    return values


def strata(count: int, random: Random) -> list[float]:
    """Draw a probability in each of `count` equal strata, rising, and none of them 0 or 1."""
    return [(i + 0.05 + 0.9 * random.random()) / count for i in range(count)]


def normal(random: Random) -> float:
    """Draw from the standard normal distribution."""
    return _STANDARD.inv_cdf(0.5 + 0.999998 * (random.random() - 0.5))


def shuffle(values: list[float], random: Random) -> None:
    """Shuffle in place (`Random.shuffle` may change with Python's version; `random()` may not)."""
    for i in range(len(values) - 1, 0, -1):
        j = int(random.random() * (i + 1))
        values[i], values[j] = values[j], values[i]


def quantile(values: Sequence[float], probability: float) -> float:
    """Return the smallest of sorted values that at least this share of them does not exceed.

    Of no values it is 0.
    """
    if not values:
        return 0.0
    return values[max(0, math.ceil(probability * len(values)) - 1)]
