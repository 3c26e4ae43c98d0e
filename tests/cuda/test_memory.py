"""Memory of the double's cards: the ledger is NVML's view, and a full card loses nothing."""

from __future__ import annotations

import threading

import pytest

from kernelproxy.common.protocol import Suspend
from kernelproxy.common.protocol.views import DeviceView
from tests.cuda.conftest import GIB
from tests.doubles.cuda.cards import Cards
from tests.doubles.waiting import wait_until
from tests.e2e.kernels import Kernel, kernel, sessions, wait_for_session
from tests.e2e.trainers import status, verb

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OUTSIDE = 700 << 20
#: The ledger may differ from NVML's view by this part.
TOLERANCE = 0.01


def ledger(device: DeviceView) -> int:
    """Return what the daemon counts on a card: storages, what workers take beside them, others."""
    outside = device.get("outside")
    assert outside is not None
    return device["memory_used"] + outside["contexts"] + outside["memory"]


def test_the_ledger_is_what_nvml_reports(notebook: Kernel, cards: Cards) -> None:
    cards.set_outside(0, OUTSIDE)
    notebook.run("import torch; x = [torch.arange(1 << 24, device='cuda') for _ in range(5)]")
    notebook.run("del x[1:3]; y = x[0] + 1; torch.cuda.synchronize()")
    with kernel() as second:
        second.run("import torch; x = torch.ones(1 << 25, device='cuda'); x.sum().item()")

        def agrees() -> bool:
            view = cards.nvml()
            found = [ledger(each) for each in status().devices]
            return all(
                abs(count - each.used) <= TOLERANCE * each.used
                for count, each in zip(found, view, strict=True)
            )

        wait_until(agrees)
        assert cards.nvml()[0].used > OUTSIDE + (3 << 27)
        outside = status().devices[0].get("outside")
        assert outside is not None
        assert abs(outside["memory"] - OUTSIDE) <= TOLERANCE * OUTSIDE


def test_a_resume_waits_for_a_card_that_others_have_filled(notebook: Kernel, cards: Cards) -> None:
    notebook.run("import torch; x = torch.arange(1 << 26, device='cuda')")
    session = wait_for_session(lambda each: each["memory"] > 0)
    verb(Suspend(session["id"]))
    cards.set_outside(0, 4 * GIB - (200 << 20))
    cards.set_outside(1, 4 * GIB - (200 << 20))
    cell = notebook.begin("print(x[-1].item(), x[12345].item())")
    found = wait_for_session(lambda each: each["state"] not in ("suspended", "running"))
    assert found["state"] != "failed"
    threading.Event().wait(3)  # several attempts of the daemon
    assert [each["id"] for each in sessions()] == [session["id"]]
    cards.set_outside(0, 0)
    cards.set_outside(1, 0)
    ran = notebook.finish(cell)
    assert (ran.stdout, ran.error_text) == (f"{(1 << 26) - 1} 12345\n", "")


def test_idle_caches_make_room_for_another_session(notebook: Kernel, cards: Cards) -> None:
    size = 5 * GIB // 2
    notebook.run(f"import torch; x = torch.empty({size}, dtype=torch.uint8, device='cuda'); del x")
    with kernel() as second:
        ran = second.run(
            f"import torch; x = torch.empty({size}, dtype=torch.uint8, device='cuda:0')\n"
            "x.fill_(3); print(x[-1].item())"
        )
        assert (ran.stdout, ran.error_text) == ("3\n", "")


def test_a_resume_without_memory_on_the_card_loses_nothing(notebook: Kernel, cards: Cards) -> None:
    notebook.run("import torch; x = torch.arange(1 << 26, device='cuda')")
    session = wait_for_session(lambda each: each["memory"] > 0)
    verb(Suspend(session["id"]))
    for card in range(2):
        cards.set_hidden(card, 4 * GIB - cards.context - (100 << 20))
    cell = notebook.begin("print(x[-1].item(), x[12345].item())")
    wait_until(lambda: len(cards.events("context")) > 4)  # the daemon tries again and again
    for card in range(2):
        cards.set_hidden(card, 0)
    ran = notebook.finish(cell)
    assert (ran.stdout, ran.error_text) == (f"{(1 << 26) - 1} 12345\n", "")


def test_a_cache_outlives_a_pause(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, cards: Cards
) -> None:
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cuda:0")
    notebook: Kernel = request.getfixturevalue("notebook")
    notebook.run(f"import torch; x = torch.ones({GIB}, dtype=torch.uint8, device='cuda'); del x")
    notebook.run("y = torch.zeros(5, device='cuda'); y.sum().item()")
    (pid,) = [each["worker_pid"] for each in sessions()]
    assert pid is not None
    kept = cards.nvml()[0].processes[pid]
    assert kept > GIB
    with kernel() as second:
        ran = second.run("import torch; print(torch.ones(5, device='cuda').sum().item())")
        assert (ran.stdout, ran.error_text) == ("5.0\n", "")
        ran = notebook.run("print((y + 1).sum().item())")
        assert (ran.stdout, ran.error_text) == ("5.0\n", "")
        assert cards.nvml()[0].processes[pid] == kept
