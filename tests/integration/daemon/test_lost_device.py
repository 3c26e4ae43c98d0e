"""Faults of a GPU's kernels, which its worker notices late: what they cost a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from tests.doubles.session.client import ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]

ASSERTED = 710
#: The first worker, and those that were careful: one to find the record, one to pass it.
WORKERS_OF_A_FAULT = 3


def works_on(client: ToyClient, workers: int) -> None:
    """Check that a session has its state, that it works, and how many workers it has had."""
    assert client.read() == client.state
    client.add(9)
    assert client.read() == client.state
    assert client.worker.epoch == workers


def test_a_fault_that_is_read_costs_two_careful_workers(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.append(f"fault {ASSERTED}")
    client.add(2)
    works_on(client, WORKERS_OF_A_FAULT)


def test_a_fault_that_nobody_reads_is_found_while_the_worker_is_idle(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    client.append(f"fault {ASSERTED}")
    wait_until(lambda: client.worker.epoch == WORKERS_OF_A_FAULT)
    host.rested(client)
    assert host.call(Suspend(client.session)).session["state"] == "suspended"
    host.call(Resume(client.session))
    works_on(client, WORKERS_OF_A_FAULT + 1)  # which was resumed from the snapshot


def test_an_idle_session_whose_device_is_lost_can_be_suspended(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    client.add(1)
    host.rested(client)
    client.append(f"hidden-fault {ASSERTED}")
    wait_until(lambda: host.session(client)["log_consumed"] == client.page.head)
    suspended = host.call(Suspend(client.session)).session
    assert (suspended["state"], suspended["worker_pid"]) == ("suspended", None)
    assert host.status().devices[0]["memory_used"] == 0
    with client.cell():
        works_on(client, WORKERS_OF_A_FAULT)


def test_an_idle_session_whose_device_is_lost_is_suspended_after_its_timeout(
    toy_host: StartHost,
) -> None:
    host = toy_host(idle_timeout=0.3)
    client = host.client()
    client.add(1)
    client.append(f"hidden-fault {ASSERTED}")
    wait_until(lambda: host.when(client, "suspended"))
    with client.cell():
        works_on(client, client.worker.epoch + 1)
    assert client.worker.epoch <= WORKERS_OF_A_FAULT + 1


def test_each_further_fault_costs_one_worker(toy_host: StartHost) -> None:
    host = toy_host()
    client = host.client()
    for number in range(3):
        client.add(number)
        client.append(f"fault {ASSERTED}")
    works_on(client, WORKERS_OF_A_FAULT + 2)


@pytest.mark.parametrize("code", [ASSERTED, 214])
def test_a_fault_that_does_not_come_again_skips_nothing(
    toy_host: StartHost, tmp_path: Path, code: int
) -> None:
    host = toy_host()
    client = host.client()
    client.append(f"fault-once {code} {tmp_path / 'made'}")
    client.add(1)
    works_on(client, 2)
