"""Plot of simulations as SVG: which share of the cells had their devices within which time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 130, 30, 50
SECONDS_MIN, SECONDS_MAX = 0.01, 1e6
TICKS = ((0.01, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"), (60, "1 min"),
         (600, "10 min"), (3600, "1 h"), (36_000, "10 h"), (360_000, "100 h"))  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
POINTS = 400


def plot(curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw the distributions of times to GPU.

    Parameters
    ----------
    curves : sequence of (str, sequence of float)
        A scheduler's name and its cells' times to GPU in seconds, in any order.

    Returns
    -------
    str
        An SVG document.
    """
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">Share of cells that have their devices within …</text>',
    ]
    for seconds, label in TICKS:
        x = _x(seconds)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
    for index, (name, times) in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _points(sorted(times)))
        y = TOP + 14 + 20 * index
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<path d="M{right + 12} {y - 4}h20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{right + 38}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _points(times: Sequence[float]) -> list[tuple[float, float]]:
    """Return a distribution's points, not more than a screen can distinguish."""
    if not times:
        return []
    indices = sorted({round(i * (len(times) - 1) / POINTS) for i in range(POINTS + 1)})
    points = [(_x(times[i]), _y((i + 1) / len(times))) for i in indices]
    return [(_x(times[0]), _y(0.0)), *points, (_x(SECONDS_MAX), _y(1.0))]


def _x(seconds: float) -> float:
    inside = min(max(seconds, SECONDS_MIN), SECONDS_MAX)
    part = math.log(inside / SECONDS_MIN) / math.log(SECONDS_MAX / SECONDS_MIN)
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
