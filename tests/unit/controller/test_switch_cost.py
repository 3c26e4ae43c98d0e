"""Estimated time of switches."""

from __future__ import annotations

import random

import pytest

from jupyter_sing.controller.switch_cost import ENOUGH, KEPT, Bandwidth, Rate

MIB = 1 << 20
BELIEVED = Rate(2e9, 0.05)


def last(bandwidth: Bandwidth, sizes: list[int], truth: Rate) -> Rate:
    for size in sizes:
        bandwidth.measured(size, truth.seconds(size))
    return bandwidth.believed


def test_rate_and_constant_are_found() -> None:
    truth = Rate(5e8, 0.2)
    found = last(Bandwidth(BELIEVED), [0, 100 * MIB, 500 * MIB, 1000 * MIB] * 3, truth)
    assert found.bytes_per_second == pytest.approx(5e8)
    assert found.constant_seconds == pytest.approx(0.2)


def test_nothing_is_believed_of_a_few() -> None:
    bandwidth = Bandwidth(BELIEVED)
    for _ in range(ENOUGH - 1):
        assert bandwidth.measured(100 * MIB, 60.0) is None
    assert bandwidth.believed == BELIEVED
    assert bandwidth.measured(100 * MIB, 60.0) == bandwidth.believed != BELIEVED


def test_a_known_switch_cost_is_not_sent_again() -> None:
    bandwidth = Bandwidth(BELIEVED)
    for size in [0, 100 * MIB, 1000 * MIB] * 5:
        assert bandwidth.measured(size, 1.1 * BELIEVED.seconds(size)) is None


def test_equal_sizes_determine_the_constant() -> None:
    found = last(Bandwidth(BELIEVED), [200 * MIB] * 8, Rate(2e9, 0.5))
    assert found.bytes_per_second == BELIEVED.bytes_per_second
    assert found.seconds(200 * MIB) == pytest.approx(Rate(2e9, 0.5).seconds(200 * MIB))


def test_a_third_of_odd_ones_changes_little() -> None:
    bandwidth, truth, dice = Bandwidth(BELIEVED), Rate(4e8, 0.1), random.Random(1)
    for number in range(KEPT):
        size = dice.choice([50, 200, 400, 800]) * MIB
        odd = 20.0 if number % 3 == 0 else 0.0
        bandwidth.measured(size, truth.seconds(size) + odd)
    assert bandwidth.believed.seconds(400 * MIB) == pytest.approx(truth.seconds(400 * MIB), rel=0.3)


def test_a_changed_switch_cost_is_measured_again() -> None:
    bandwidth = Bandwidth(BELIEVED)
    last(bandwidth, [0, 500 * MIB] * KEPT, Rate(1e8, 1.0))
    found = last(bandwidth, [0, 500 * MIB] * KEPT, Rate(1e9, 0.01))
    assert found.seconds(500 * MIB) == pytest.approx(Rate(1e9, 0.01).seconds(500 * MIB), rel=0.2)


def test_larger_ones_that_take_no_longer_are_no_error() -> None:
    bandwidth = Bandwidth(BELIEVED)
    for number in range(2 * KEPT):
        bandwidth.measured((number % 5) * 100 * MIB, 0.3 - 0.01 * (number % 5))
    assert 0.2 < bandwidth.believed.seconds(200 * MIB) < 0.4
