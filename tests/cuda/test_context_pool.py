"""The context pool on the double's cards: who gets the context, and when it gives way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kernelproxy.agent.state.context_pool import QUIET_SECONDS
from tests.cuda.conftest import GIB
from tests.cuda.test_memory import TOLERANCE, ledger
from tests.doubles.cuda.cards import Cards
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import Kernel, kernel, sessions
from tests.e2e.trainers import status

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("operators")]

COMPUTE = "import torch; print(torch.ones(5, device='cuda').sum().item())"


@pytest.fixture
def first(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """A notebook that has used the only card."""
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cuda:0")
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    with kernel() as started:
        assert started.run(COMPUTE).stdout == "5.0\n"
        yield started


def workers() -> list[int]:
    """Return the pids of the sessions' workers."""
    return [pid for each in sessions() if (pid := each["worker_pid"]) is not None]


def made_in_advance(cards: Cards) -> int:
    """Wait until a worker without a session has a context, and return its pid."""
    assigned = workers()

    def ready() -> int | None:
        made = {each.pid for each in cards.events("context")}
        rested = {each.pid for each in cards.events("synchronize")}
        alive = cards.nvml()[0].processes
        return next((pid for pid in made & rested & set(alive) if pid not in assigned), None)

    return wait_until(ready)


def test_the_next_session_gets_the_context_made_in_advance(first: Kernel, cards: Cards) -> None:
    pid = made_in_advance(cards)
    with kernel() as second:
        assert second.run(COMPUTE).stdout == "5.0\n"
        assert pid in workers()
        assert [each.details for each in cards.events("context")] == ["0", "0"]
        # Then there is one for the session after it.
        assert made_in_advance(cards) not in workers()
    assert cards.events("unsupported", "fault") == []


def test_the_ledger_counts_the_context_made_in_advance(first: Kernel, cards: Cards) -> None:
    pid = made_in_advance(cards)

    def agrees() -> bool:
        view = cards.nvml()[0]
        (card,) = status().devices
        return pid in view.processes and abs(ledger(card) - view.used) <= TOLERANCE * view.used

    wait_until(agrees)
    outside = status().devices[0].get("outside")
    assert outside is not None
    assert outside["memory"] == 0


def test_the_context_made_in_advance_gives_way_to_memory(first: Kernel, cards: Cards) -> None:
    made_in_advance(cards)
    with kernel() as second:
        assert second.run(COMPUTE).stdout == "5.0\n"
        # Two contexts fit into what is reserved for them, and a third one does not.
        pid = made_in_advance(cards)
        size = cards.memory[0] - GIB - (64 << 20)
        ran = first.run(
            f"x = torch.empty({size}, dtype=torch.uint8, device='cuda'); x.fill_(3)\n"
            "print(x[-1].item())"
        )
        assert (ran.stdout, ran.error_text) == ("3\n", "")
        assert pid not in cards.nvml()[0].processes


def test_the_context_in_advance_can_be_switched_off(
    cards: Cards, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("JUPYTER_SING_CONTEXT_POOL", "0")
    request.getfixturevalue("first")
    threading.Event().wait(2 * QUIET_SECONDS)
    assert [each.pid for each in cards.events("context")] == workers()
