"""Real programs that share a device: the scheduler gives it to one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.trainers import WEIGHTS, program, session_of, status
from tests.integration.conftest import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MIB = 1 << 20
#: So many steps take longer than anybody may run while others wait.
STEPS = 1500


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1")


def sing(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_sing.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_trainings_that_take_turns_on_a_device_lose_no_bit() -> None:
    seeds = (1, 2)
    expected = []
    for seed in seeds:
        with program(seed, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            expected.append(plain.train(STEPS))
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0")) for seed in seeds
        ]
        for each in trainers:
            assert each.answer() == ["ready"]
            each.ask(STEPS)
        waiting = wait_until(
            lambda: [each for each in status().sessions if each["state"] == "queued"]
        )
        assert waiting[0]["tier"] == "resident"  # both fit, so only the device's time is shared
        assert [each.answer() for each in trainers] == expected
        said = [json.loads(sing("why", each.session, "--json"))["decisions"] for each in trainers]
        kinds = {each["kind"] for decisions in said for each in decisions}
        assert {"grant", "preempt"} <= kinds
        assert "may use cpu:0" in sing("why", trainers[0].session)


def test_sessions_of_twice_the_memory_all_make_progress() -> None:
    with ExitStack() as stack:
        found = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0", path=WEIGHTS))
            for seed in range(8)
        ]
        assert [each.answer() for each in found] == [["ready"]] * 8
        for each in found:
            each.ask(f"load 6 {16 * MIB}")  # each a quarter of the device
        assert [each.answer() for each in found] == [["there"]] * 8
        expected = [each.do("digest") for each in found]
        for each in found:
            each.ask("infer 20")
        answers = [each.answer() for each in found]
        assert len({answer for (answer,) in answers}) == 8
        for each in found:
            each.ask("digest")
        assert [answer for each in found for answer in each.answer()] == expected


def test_sessions_of_one_device_spread_over_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1,cpu:384MiB@1")
    with (
        program(1, proxied=True, device="cpu:0") as first,
        program(2, proxied=True, device="cpu:0") as second,
    ):
        for each in (first, second):
            assert each.answer() == ["ready"]
            each.train(1)
        for each in (first, second):
            each.ask(STEPS)
        wait_until(lambda: session_of(first)["device"] != session_of(second)["device"])
        for each in (first, second):
            assert len(each.answer()) == STEPS
