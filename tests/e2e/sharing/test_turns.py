"""Real programs that share a device: the scheduler gives it to one after another."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kernelproxy.common.protocol.views import SessionView
from tests.e2e.trainers import WEIGHTS, Program, program, session_of, status

pytestmark = [pytest.mark.e2e]

MIB = 1 << 20
#: This many steps take a second or two.
STEPS = 1500


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:384MiB@1")


def sing(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_sing.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def decided(trainer: Program) -> set[str]:
    """Return the kinds of decisions about a session."""
    said = json.loads(sing("why", trainer.session, "--count", "1000", "--json"))
    return {each["kind"] for each in said["decisions"]}


def test_trainings_that_take_turns_on_a_device_lose_no_bit() -> None:
    seeds = (1, 2)
    steps, done, answers = STEPS, 0, [list[str](), list[str]()]
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0")) for seed in seeds
        ]
        for each in trainers:
            assert each.answer() == ["ready"]
        # Until a turn has ended in the middle of a request, however fast this machine is.
        while not any({"grant", "queued", "preempt"} <= decided(each) for each in trainers):
            for each in trainers:
                each.ask(steps)
            for each, answer in zip(trainers, answers, strict=True):
                answer += each.answer()
            done, steps = done + steps, 2 * steps
        assert "may use Simulated GPU 0" in sing("why", trainers[0].session)
        assert [session_of(each)["tier"] for each in trainers] == ["resident"] * 2  # both fit
    for seed, answer in zip(seeds, answers, strict=True):
        with program(seed, proxied=False) as plain:
            assert plain.answer() == ["ready"]
            assert plain.train(done) == answer


def test_a_waiting_session_shows_its_place_and_expected_wait() -> None:
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(program(seed, proxied=True, device="cpu:0")) for seed in (1, 2)
        ]
        for each in trainers:
            assert each.answer() == ["ready"]
        steps, told = STEPS, list[SessionView]()
        while not told:
            for each in trainers:
                each.ask(steps)
            while not told and any(each["state"] != "idle" for each in status().sessions):
                told = [each for each in status().sessions if each["expected_wait"] is not None]
            for each in trainers:
                assert len(each.answer()) == steps
            steps *= 2
    assert [each["queue_position"] for each in told] == [1]
    assert told[0]["reason"].startswith("Waiting for ")
    assert "You are next, " in told[0]["reason"]


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
    with ExitStack() as stack:
        first, _, third = (stack.enter_context(program(seed, proxied=True)) for seed in range(3))
        assert session_of(first)["device"] == session_of(third)["device"]
        for each in (first, third):
            assert each.answer() == ["ready"]
        steps = STEPS
        while session_of(first)["device"] == session_of(third)["device"]:
            for each in (first, third):
                each.ask(steps)
            for each in (first, third):
                assert len(each.answer()) == steps
            steps *= 2
