"""Since when the state of a session is approximate, or would be after a recovery."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from jupyter_sing.notebook import status_text
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.protocol.views import ExactnessView
from kernelproxy.devices import configured_devices
from tests.unit.fake_daemon import EXACTNESS, SESSION


@pytest.fixture
def state() -> Iterator[DeviceState]:
    found = DeviceState("s", configured_devices()[0], AgentSettings())
    yield found
    found.memory.close()


def test_the_times_are_those_of_the_snapshot_that_is_kept(state: DeviceState) -> None:
    page = state.memory.worker
    assert state.inexact_since(0) is None
    assert state.recovered_since is None
    page.frozen, page.older_inexact_ns, page.inexact_ns = 100, 3_000_000_000, 0
    assert state.inexact_since(0) == 3.0  # the snapshot at 100 is not kept
    assert state.inexact_since(100) is None
    page.inexact_ns, page.recovered_ns = 5_000_000_000, 4_000_000_000
    assert state.inexact_since(100) == 5.0
    assert state.recovered_since == 4.0
    state.forget_exactness()
    assert state.inexact_since(0) is state.inexact_since(100) is state.recovered_since is None


def test_new_sessions_have_the_setting(state: DeviceState) -> None:
    assert state.memory.agent.deterministic == 0
    settings = dataclasses.replace(AgentSettings(), deterministic=True)
    other = DeviceState("s", state.device, settings)
    assert other.memory.agent.deterministic == 1
    other.memory.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"approximate_since": "T"}, ["Recoverable, approximately since T."]),
        (
            {"recovered_since": "T"},
            ["Recovered approximately since T: values read since then may differ slightly."],
        ),
        (
            {"recovered_since": "T", "diverged": 2, "deterministic": True},
            [
                "Recovered approximately since T: values read since then may differ slightly. "
                "One or more results had another size.",
                "Deterministic: a recovery is exact.",
            ],
        ),
    ],
)
def test_users_are_told(changes: ExactnessView, expected: list[str]) -> None:
    assert (
        status_text.exactness_lines({**SESSION, "exactness": {**EXACTNESS, **changes}}) == expected
    )
    assert status_text.exactness_lines(SESSION) == []
