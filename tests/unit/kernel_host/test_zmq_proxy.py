"""Clients of a kernel do not notice when its process is replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.zmq_proxy.connection import CHANNELS, Connection, private
from kernelproxy.zmq_proxy.proxy import ZmqProxy
from tests.doubles.kernel.kernel import SECONDS_MAX, Client, FakeKernel

KEY = b"0123456789abcdef"
# A kernel that forks a child which outlives it.
FORKING = """
import os, socket, sys
from kernelproxy.zmq_proxy.connection import Connection, private
from kernelproxy.zmq_proxy.proxy import ZmqProxy
connection = private(Connection("", {}, b"key"))
proxy = ZmqProxy(connection, print, print)
client = socket.create_connection((connection.ip, connection.ports["shell"]))
client.recv(10)  # it was accepted
wait, end = os.pipe()
forked, began = os.pipe()
child = os.fork()
if not child:
    client.close()
    os.close(end)
    os.write(began, b".")
    os.read(wait, 1)
    os._exit(0)
os.read(forked, 1)
proxy.close()
while client.recv(1000):
    pass
ZmqProxy(connection, print, print).close()
os.close(end)
sys.exit(os.waitpid(child, 0)[1])
"""


class Wiring:
    """A ZMQ proxy, its kernels and its clients."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.process_requests, self.shutdowns = threading.Semaphore(0), threading.Semaphore(0)
        self.connection = private(Connection("", {}, KEY))
        self.proxy = ZmqProxy(
            self.connection, self.process_requests.release, self.shutdowns.release
        )
        stack.callback(self.proxy.close)

    def client(self, key: bytes = KEY) -> Client:
        client = Client(self.connection, key)
        self._stack.callback(client.close)
        return client

    def subscribed(self) -> Client:
        """Return a client that receives all output; the proxy reports the first subscription."""
        client = self.client()
        client.subscribed()
        return client

    def kernel(
        self, name: str = "", *, deaf: int = 0, mute: int = 0
    ) -> tuple[FakeKernel, Connection]:
        where = private(self.connection)
        kernel = FakeKernel(where, name, deaf=deaf, mute=mute)
        self._stack.callback(kernel.close)
        return kernel, where

    def connected(self, name: str = "") -> FakeKernel:
        kernel, where = self.kernel(name)
        self.proxy.connect(where)
        return kernel

    def hibernate(self, kernel: FakeKernel) -> None:
        self.proxy.hold(SECONDS_MAX)
        kernel.close()
        self.proxy.detach()

    def return_as(self, where: Connection) -> None:
        self.proxy.prepare(where, SECONDS_MAX, beside=False)
        self.proxy.adopt()
        self.proxy.let_through()


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    with ExitStack() as stack:
        yield Wiring(stack)


def codes(client: Client, count: int) -> list[tuple[str, str]]:
    """Return the next replies: the request that each answers, and the kernel that has sent it."""
    replies = [client.hear() for _ in range(count)]
    return [(each["parent_header"]["msg_id"], each["content"]["by"]) for each in replies]


def test_everything_is_passed_on_in_order(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.subscribed()
    asked = [client.run(f"cell {number}") for number in range(500)]
    assert codes(client, 500) == [(each, "") for each in asked]
    assert client.output(until=asked[-1]) == [f"cell {number}" for number in range(500)]
    assert kernel.asked == [f"cell {number}" for number in range(500)]
    assert client.beats()


def test_requests_before_the_kernel_starts_wait_for_it(wiring: Wiring) -> None:
    client = wiring.subscribed()
    asked = client.run("early")
    kernel, where = wiring.kernel()
    wiring.proxy.connect(where)
    assert codes(client, 1) == [(asked, "")]
    assert client.output(until=asked) == ["early"]
    assert kernel.asked == ["early"]


def test_a_kernel_receives_no_request_until_its_output_arrives(wiring: Wiring) -> None:
    client = wiring.subscribed()
    asked = client.run("first")
    kernel, where = wiring.kernel(mute=3)
    wiring.proxy.connect(where)
    assert client.output(until=asked) == ["first"]
    assert kernel.asked == ["first"]


def test_large_messages_and_their_buffers_pass(wiring: Wiring) -> None:
    wiring.connected()
    client, buffers = wiring.client(), (b"\x00\xff" * (4 << 20), b"", b"<IDS|MSG>")
    client.ask("execute_request", buffers=buffers, code="x" * (4 << 20))
    assert tuple(map(bytes, client.hear()["buffers"])) == buffers


def test_each_client_answers_its_own_input_request(wiring: Wiring) -> None:
    wiring.connected()
    first, second = wiring.subscribed(), wiring.client()
    assert second.beats()  # now its channels are connected
    for client, value in ((second, "two"), (first, "one")):
        asked = client.run("input")
        assert client.hear("stdin")["msg_type"] == "input_request"
        client.give(value)
        assert first.output(until=asked) == [value]
        assert codes(client, 1) == [(asked, "")]
    assert not second.hears("stdin")


def test_held_requests_wait_and_replies_pass(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.subscribed()
    before = client.run("stop")
    assert kernel.stopped.wait(SECONDS_MAX)
    wiring.proxy.pause()
    held = [client.run("later"), client.ask("usage_request", "control")]
    assert client.beats()
    kernel.go.set()
    assert client.output(until=before) == ["stop"]
    assert codes(client, 1) == [(before, "")]
    wiring.proxy.hold(SECONDS_MAX)
    assert kernel.asked == ["stop"]
    wiring.proxy.let_through()
    assert codes(client, 1) == [(held[0], "")]
    assert client.hear("control")["parent_header"]["msg_id"] == held[1]


def test_holding_waits_for_all_requests(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.client()
    client.ask("comm_msg")
    client.ask("unknown_request")
    client.run("stop")
    assert kernel.stopped.wait(SECONDS_MAX)
    with ThreadPoolExecutor() as pool:
        holding = pool.submit(wiring.proxy.hold, SECONDS_MAX)
        kernel.speak.clear()
        kernel.go.set()
        client.hear()  # the reply; its output has not arrived
        assert not holding.done()
        kernel.speak.set()
        holding.result()
    assert kernel.asked == ["comm_msg", "unknown_request", "stop"]


def test_a_kernel_that_is_busy_is_not_held(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.client()
    first = client.run("stop")
    assert kernel.stopped.wait(SECONDS_MAX)
    with pytest.raises(ProcessError, match="busy"):
        wiring.proxy.hold(0.01)
    second = client.run("next")
    kernel.go.set()
    assert codes(client, 2) == [(first, ""), (second, "")]


def test_requests_that_kernels_ignore_are_not_waited_for(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.client()
    wiring.client(key=b"another").run("forged")
    client.run("honest")
    client.hear()
    wiring.proxy.hold(SECONDS_MAX)
    assert kernel.asked == ["honest"]


def test_another_process_answers_what_the_first_has_not(wiring: Wiring) -> None:
    old, client = wiring.connected("old: "), wiring.subscribed()
    asked = [client.run("last"), *(client.run(f"cell {number}") for number in range(50))]
    client.begun(asked[0])
    wiring.proxy.pause()
    late = client.run("late")
    new, where = wiring.kernel("new: ")
    wiring.proxy.prepare(where, SECONDS_MAX, beside=True)
    with ThreadPoolExecutor() as pool:
        replacing = pool.submit(wiring.proxy.replace, SECONDS_MAX)
        old.go.set()
        replacing.result()
    by = dict.fromkeys([*asked, late], "new: ") | {asked[0]: "old: "}
    assert codes(client, 52) == list(by.items())
    cells = [*(f"cell {number}" for number in range(50)), "late"]
    assert client.output(until=late) == ["old: last", *(f"new: {cell}" for cell in cells)]
    assert new.asked == cells


def test_answered_requests_are_not_repeated(wiring: Wiring) -> None:
    wiring.connected("old: ")
    client = wiring.subscribed()
    asked = [client.run("one"), client.run("two")]
    client.output(until=asked[1])
    wiring.proxy.pause()
    new, where = wiring.kernel("new: ")
    wiring.proxy.prepare(where, SECONDS_MAX, beside=True)
    wiring.proxy.replace(SECONDS_MAX)
    asked.append(client.run("three"))
    assert codes(client, 3) == list(zip(asked, ("old: ", "old: ", "new: "), strict=True))
    assert new.asked == ["three"]


def test_a_kernel_that_does_not_finish_is_not_replaced(wiring: Wiring) -> None:
    old, client = wiring.connected("old: "), wiring.subscribed()
    first = client.run("stop")
    client.begun(first)
    wiring.proxy.pause()
    new, where = wiring.kernel("new: ")
    wiring.proxy.prepare(where, SECONDS_MAX, beside=True)
    with pytest.raises(ProcessError, match="does not end"):
        wiring.proxy.replace(0.01)
    wiring.proxy.discard()
    wiring.proxy.let_through()
    second = client.run("next")
    old.go.set()
    assert codes(client, 2) == [(first, "old: "), (second, "old: ")]
    assert client.output(until=second) == ["old: stop", "old: next"]
    assert new.asked == []


def test_output_of_a_process_beside_is_not_shown(wiring: Wiring) -> None:
    wiring.connected("old: ")
    client = wiring.subscribed()
    wiring.proxy.pause()
    _, where = wiring.kernel("new: ")
    wiring.proxy.prepare(where, SECONDS_MAX, beside=True)
    stranger = Client(where)  # triggers output of it
    stranger.run("aside")
    stranger.hear()
    stranger.close()
    wiring.proxy.discard()
    wiring.proxy.let_through()
    assert client.output(until=client.run("cell")) == ["old: cell"]


def test_an_unresponsive_process_does_not_become_the_kernel(wiring: Wiring) -> None:
    old, client = wiring.connected("old: "), wiring.client()
    wiring.proxy.pause()
    _, where = wiring.kernel("new: ", deaf=10**6)
    with pytest.raises(ProcessError, match="does not answer"):
        wiring.proxy.prepare(where, 0.01, beside=True)
    with pytest.raises(ProcessError, match="no process to take"):
        wiring.proxy.replace(SECONDS_MAX)
    wiring.proxy.let_through()
    asked = client.run("cell")
    assert codes(client, 1) == [(asked, "old: ")]
    assert old.asked == ["cell"]


def test_a_process_that_lacked_the_key_is_probed_again(wiring: Wiring) -> None:
    wiring.hibernate(wiring.connected())
    _, where = wiring.kernel("new: ", deaf=2)
    wiring.return_as(where)
    client = wiring.client()
    asked = client.run("cell")
    assert codes(client, 1) == [(asked, "new: ")]


def test_a_hibernating_kernel_answers_heartbeats_and_welcomes_clients(wiring: Wiring) -> None:
    wiring.hibernate(wiring.connected())
    assert wiring.subscribed().beats()
    assert not wiring.process_requests.acquire(blocking=False)


def test_the_first_request_requests_a_process_and_all_are_answered_in_order(wiring: Wiring) -> None:
    old, first, second = wiring.connected(), wiring.subscribed(), wiring.client()
    wiring.hibernate(old)
    asked = [first.run(f"cell {number}") for number in range(50)]
    assert wiring.process_requests.acquire(timeout=SECONDS_MAX)
    other = second.run("other")
    new, where = wiring.kernel("new: ")
    wiring.return_as(where)
    assert codes(first, 50) == [(each, "new: ") for each in asked]
    assert codes(second, 1) == [(other, "new: ")]
    printed = first.output(until=asked[-1])
    cells = [f"new: cell {number}" for number in range(50)]
    assert [text for text in printed if text != "new: other"] == cells
    assert sorted(new.asked) == sorted([*(f"cell {n}" for n in range(50)), "other"])
    assert not wiring.process_requests.acquire(blocking=False)


def test_automatic_requests_of_front_ends_do_not_wake_the_kernel(wiring: Wiring) -> None:
    old, client = wiring.connected(), wiring.client()
    wiring.hibernate(old)
    client.ask("usage_request", "control")
    wiring.client(key=b"another").run("forged")
    interrupted = client.ask("interrupt_request", "control")
    reply = client.hear("control")  # so all before it was seen
    assert (reply["msg_type"], reply["parent_header"]["msg_id"]) == ("interrupt_reply", interrupted)
    assert not wiring.process_requests.acquire(blocking=False)
    client.ask("kernel_info_request", "control")
    assert wiring.process_requests.acquire(timeout=SECONDS_MAX)


def test_a_hibernating_kernel_can_be_ended(wiring: Wiring) -> None:
    old, client = wiring.connected(), wiring.client()
    wiring.hibernate(old)
    asked = client.ask("shutdown_request", "control", restart=False)
    assert wiring.shutdowns.acquire(timeout=SECONDS_MAX)
    reply = client.hear("control")
    assert (reply["msg_type"], reply["parent_header"]["msg_id"]) == ("shutdown_reply", asked)
    assert not wiring.process_requests.acquire(blocking=False)


def test_a_failed_wake_up_is_repeated(wiring: Wiring) -> None:
    old, client = wiring.connected(), wiring.client()
    wiring.hibernate(old)
    asked = [client.run("one")]
    assert wiring.process_requests.acquire(timeout=SECONDS_MAX)
    wiring.proxy.listen()
    asked.append(client.run("two"))
    assert wiring.process_requests.acquire(timeout=SECONDS_MAX)
    _, where = wiring.kernel("new: ")
    wiring.return_as(where)
    assert codes(client, 2) == [(each, "new: ") for each in asked]


def test_requests_for_other_threads_are_waited_for(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.client()
    client.ask("execute_request", code="stop", subshell="thread")
    assert kernel.stopped.wait(SECONDS_MAX)
    with pytest.raises(ProcessError, match="busy"):
        wiring.proxy.hold(0.01)
    kernel.go.set()
    client.hear()
    wiring.proxy.hold(SECONDS_MAX)


def test_its_ports_are_free_as_soon_as_it_is_closed(wiring: Wiring) -> None:
    for _ in range(20):
        wiring.connected()
        wiring.client().ask("kernel_info_request")
        wiring.proxy.close()
        wiring.proxy.close()
        wiring.proxy = ZmqProxy(wiring.connection, print, print)
    wiring.proxy.close()
    with pytest.raises(ProcessError, match="ended"):
        wiring.proxy.hold(0.0)


def test_ports_that_are_taken_are_reported(wiring: Wiring) -> None:
    with pytest.raises(ProcessError, match="in use"):
        ZmqProxy(wiring.connection, print, print)


def test_closing_ends_what_is_waited_for(wiring: Wiring) -> None:
    kernel, client = wiring.connected(), wiring.client()
    client.run("stop")
    assert kernel.stopped.wait(SECONDS_MAX)
    with ThreadPoolExecutor() as pool:
        holding = pool.submit(wiring.proxy.hold, SECONDS_MAX)
        wiring.proxy.pause()
        wiring.proxy.close()
        with pytest.raises(ProcessError, match="ended"):
            holding.result()
    assert set(wiring.connection.ports) == set(CHANNELS)


def test_a_forked_child_keeps_neither_ports_nor_clients() -> None:
    """In a process of its own: this one has threads, and must not be forked."""
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=SECONDS_MAX)
