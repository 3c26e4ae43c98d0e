"""Sentences about the number of devices of a job."""

from __future__ import annotations

import math

import pytest

from jupyter_sing.scheduler.gangs.job_text import grow_text, shrink_text, size_text
from jupyter_sing.scheduler.state import Gang


@pytest.mark.parametrize(
    ("before", "after", "seconds", "expected"),
    [
        (1, 2, 30.0, "Job of 4 ranks grows from 1 device to 2: a device has been idle for 30 s"),
        (
            2,
            4,
            120.0,
            "Job of 4 ranks grows from 2 devices to 4: 2 devices have been idle for 2 min",
        ),
        (1, 2, 0.0, "Job of 4 ranks grows from 1 device to 2: a device is idle"),
        (2, 4, 0.0, "Job of 4 ranks grows from 2 devices to 4: 2 devices are idle"),
    ],
)
def test_growth_says_what_was_idle(before: int, after: int, seconds: float, expected: str) -> None:
    assert grow_text(4, before, after, seconds) == expected


def test_shrinking_says_who_waits() -> None:
    said = shrink_text(8, 4, 2, "alice waits with premium")
    assert said == "Job of 8 ranks shrinks from 4 devices to 2: alice waits with premium"


@pytest.mark.parametrize(
    ("devices", "cause", "shrunk", "grow_after", "expected"),
    [
        (2, "", False, 30.0, "Job of 4 ranks runs on 2 devices"),
        (1, "", False, 30.0, "Job of 4 ranks runs on 1 device"),
        (
            1, "alice waits with premium", True, 30.0,
            "Job of 4 ranks runs on 1 of 2 devices: alice waits with premium; it grows again when a"
            " device has been idle for 30 s",
        ),
        (
            1, "no other device is free", False, 0.0,
            "Job of 4 ranks runs on 1 of 2 devices: no other device is free; it grows when a device"
            " is idle",
        ),
        (
            1, "no other device is free", False, math.inf,
            "Job of 4 ranks runs on 1 of 2 devices: no other device is free; the policy does not"
            " let it grow",
        ),
        (
            1, "alice waits with premium", True, math.inf,
            "Job of 4 ranks runs on 1 of 2 devices: alice waits with premium; the policy does not"
            " let it grow again",
        ),
    ],
)  # fmt: skip
def test_sizes_are_explained(
    devices: int, cause: str, shrunk: bool, grow_after: float, expected: str
) -> None:
    gang = Gang(4, 1, 2, 0, cause=cause, shrunk=shrunk)
    assert size_text(gang, devices, grow_after) == expected
