"""Sessions under a real daemon: suspended, resumed, killed and closed, with toy workers."""

from __future__ import annotations

import os
import time

MIB = 1 << 20


def wait_until(condition, seconds: float = 20.0):
    """Wait for what nobody announces, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def test_a_session_starts_at_its_first_record(toy_host) -> None:
    host = toy_host()
    client = host.client()
    before = host.session(client)
    assert (before["state"], before["worker_pid"], before["memory"]) == ("idle", None, 0)
    client.add(1)
    client.add(2)
    assert client.read() == client.state
    after = host.session(client)
    assert after["worker_pid"] in host.children()
    assert (after["state"], after["tier"], after["operators"]) == ("idle", "resident", 2)
    assert after["kernel_pid"] == os.getpid()
