"""Sessions whose log cannot be kept for recovery, under a real daemon with toy workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernelproxy.common.protocol import Resume, Suspend
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

StartHost = Callable[..., ToyHost]

MANY = 20_000  # records of 16 bytes or more: several times the log's size, so that some was freed


@pytest.mark.parametrize("why", ["faster than 64.0 KiB", "budget of host memory"])
def test_a_log_that_cannot_be_kept_is_forgone_and_reported(
    toy_host: StartHost, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A snapshot that stalls for a day may not be repeated for years; small records are no upload.
    monkeypatch.setenv("TOY_STALLED_NS", str(86_400 * 10**9))
    small = {"host_memory": 1, "disk_quota": 0} if "memory" in why else {}
    host = toy_host(log_bytes=1 << 16, log_budget=1 << 15, **small)
    client = host.client()
    with client.cell():
        for number in range(MANY):
            client.add(number)
        assert client.read() == client.state
        found = host.session(client)
        assert (found["state"], found["recoverable"]) == ("running", False)
        assert why in found["reason"]
    host.call(Suspend(client.session))
    found = host.session(client)
    assert found["recoverable"] is True
    assert why not in found["reason"]
    host.call(Resume(client.session))
    client.add(1)
    assert client.read() == client.state


def test_a_session_that_loses_worker_and_log_shows_the_reason(
    toy_host: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_STALLED_NS", str(86_400 * 10**9))
    host = toy_host(log_bytes=1 << 16, log_budget=1 << 15)
    client = host.client()
    with client.cell():
        for number in range(MANY):
            client.add(number)
        client.read()
        wait_until(lambda: host.kill_worker(client))
        with pytest.raises(RuntimeError, match=r"GPU process died\. It fills its log faster"):
            client.read()
