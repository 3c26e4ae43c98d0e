"""Messages are transferred unchanged, and anything else is refused."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kernelproxy.common.errors import ProtocolError
from kernelproxy.common.ipc import framing
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import (
    Attached,
    Bell,
    Deposit,
    Done,
    Message,
    Open,
    OpenSession,
    StatusReply,
    Suspend,
)
from tests.unit.fake_daemon import DEVICE

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


MESSAGES = [
    Bell(),
    Done(),
    OpenSession("Übung.ipynb", "k", "python", 600, None, True),
    OpenSession("n", "", "python", 0.5, "cpu:0"),
    StatusReply([DEVICE | {"sessions": ["a"]}], []),
    Open("s", "cpu", 2, 1 << 60, [1, 2], True, False),
    Deposit("s", {"request": {"name": "n"}, "hold": None}, ["log", "agent"]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_sent(pair: Pair, message: Message) -> None:
    send_message(pair[0], message)
    assert recv_message(pair[1]) == (message, [])


def test_a_message_of_many_megabytes_passes(pair: Pair) -> None:
    message = StatusReply([DEVICE | {"id": "x" * (4 << 20)}], [])
    sender = threading.Thread(target=send_message, args=(pair[0], message))
    sender.start()
    assert recv_message(pair[1]) == (message, [])
    sender.join()


def test_descriptors_come_with_their_message(pair: Pair) -> None:
    read_end, write_end = os.pipe()
    send_message(pair[0], Bell())
    send_message(pair[0], Attached("s"), [write_end])
    send_message(pair[0], Done())
    assert recv_message(pair[1]) == (Bell(), [])
    message, (received,) = recv_message(pair[1])
    assert message == Attached("s")
    assert recv_message(pair[1]) == (Done(), [])
    os.write(received, b"!")
    assert os.read(read_end, 1) == b"!"
    assert not os.get_inheritable(received)
    for fd in (read_end, write_end, received):
        os.close(fd)


def test_a_sender_may_be_gone_once_its_message_is_complete(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_fds = socket.send_fds

    def send_and_be_gone(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        pair[1].close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_be_gone)
    with open(os.devnull, "rb") as file:
        send_message(pair[0], Done(), [file.fileno()])


def test_a_decoder_gives_each_of_several_frames_its_descriptors() -> None:
    decoder = framing.FrameDecoder()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    sent = framing.encode(Bell()) + framing.encode(Attached("s"), 2) + framing.encode(Done())
    decoder.feed(sent[:10])
    assert decoder.next_message() is None
    decoder.feed(sent[10:], fds)
    assert decoder.next_message() == (Bell(), [])
    assert decoder.next_message() == (Attached("s"), fds)
    assert decoder.next_message() == (Done(), [])
    assert decoder.next_message() is None
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"kind": "Nothing"}',
        b'{"kind": ["Bell"]}',
        b'{"kind": "Bell", "extra": 1}',
        b'{"kind": "Bell", "fds": -1}',
        b'{"kind": "Bell", "fds": true}',
        b'{"kind": "CloseSession"}',
        b'{"kind": "CloseSession", "session": 1}',
        b'{"kind": "OpenSession", "name": "n", "kernel_id": "", "python": "p", "script": 1}',
        b'{"kind": "OpenSession", "name": "", "kernel_id": "", "python": "", "idle_timeout": "1"}',
        b'{"kind": "OpenSession", "name": "", "kernel_id": "", "python": "", "idle_timeout": NaN}',
        b'{"kind": "Open", "session": "s", "device": "cpu", "threads": true, "epoch": 1,'
        b' "skip": [], "snapshot": false, "gate": true}',
        b'{"kind": "Open", "session": "s", "device": "cpu", "threads": 1, "epoch": 1,'
        b' "skip": ["1"], "snapshot": false, "gate": true}',
        b'{"kind": "Activity", "since": 1' + b"0" * 400 + b"}",
        b'{"kind": "Activity", "since": 1e400}',
        b'{"kind": "Why", "session": "s", "count": 1' + b"0" * 400 + b"}",
        b'{"kind": "Why", "session": "s", "count": 1' + b"0" * 5000 + b"}",
        b'{"kind": "Carried", "session": "s", "verb": "v", "name": "n", "outcome": {"a": [1e999]}}',
        b'{"kind": "Carried", "session": "s", "verb": "v", "name": "n", "outcome": {"a": NaN}}',
        b'{"kind": "Suspend", "session": "\\ud800"}',
        b'{"kind": "Suspend", "session": "\xed\xa0\x80"}',
        b'{"kind": "Carried", "session": "", "verb": "", "name": "", "outcome": {"\\uDFFF": 1}}',
        b'{"kind": "Carried", "session": "", "verb": "", "name": "", "outcome": {"a": '
        + b"[" * 40
        + b"]" * 40
        + b"}}",
        '{"kind": "Bell"}'.encode("utf-16"),
    ],
)
def test_an_invalid_message_is_refused(pair: Pair, body: bytes) -> None:
    pair[0].sendall(struct.pack("<I", len(body)) + body)
    with pytest.raises(ProtocolError):
        recv_message(pair[1])


def test_names_that_are_not_utf_8_and_emoji_pass(pair: Pair) -> None:
    message = Suspend(
        "s", os.fsdecode(b"\xff") + "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}"
    )
    send_message(pair[0], message)
    assert recv_message(pair[1]) == (message, [])


@pytest.mark.parametrize("begin", [
    b'{"kind": "Suspend", "session": "', b'{"session": "s", "kind": "Checkpoint", "name": "',
    b'{"kind": "Nothing", "a": "', b"[" * 100, b'{"kind": "SetPolicy", "policy": "',
])  # fmt: skip
def test_a_message_too_long_for_its_kind_is_refused_before_it_arrives(begin: bytes) -> None:
    decoder = framing.FrameDecoder()
    decoder.feed(struct.pack("<I", 2 << 20) + begin[:20])
    assert decoder.next_message() is None  # its kind is not known yet
    decoder.feed(begin[20:].ljust(100))
    with pytest.raises(ProtocolError, match="too large: 2097152 bytes"):
        decoder.next_message()


def test_values_are_counted_before_they_are_made() -> None:
    body = b'{"kind":"Checkpoint","session":"s","host":{"a":[' + b"[]," * 300_000 + b"[]]}}"
    decoder = framing.FrameDecoder(framing.Bounds(values=100_000))
    decoder.feed(struct.pack("<I", len(body)) + body)
    with pytest.raises(ProtocolError, match="more than 100000 values"):
        decoder.next_message()


def test_a_huge_length_is_refused_before_anything_is_read(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", framing.FRAME_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="too large"):
        recv_message(pair[1])


def test_unclaimed_descriptors_are_refused_and_closed(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    body = json.dumps({"kind": "Bell"}).encode()
    socket.send_fds(pair[0], [struct.pack("<I", len(body)) + body], [0, 0])
    with pytest.raises(ProtocolError, match="descriptors"):
        recv_message(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_descriptors_are_refused_and_closed(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(pair[0], [framing.encode(Bell())], [0] * (framing.FDS_MAX + 20))
    with pytest.raises(ProtocolError, match="Too many"):
        recv_message(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_connection_is_a_connection_error(pair: Pair) -> None:
    pair[0].sendall(b"\x10\0\0\0{")
    pair[0].close()
    with pytest.raises(ConnectionError):
        recv_message(pair[1])


def test_too_large_a_message_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="too large"):
        send_message(pair[0], Suspend("s", "x" * Suspend.frame_bytes_max))
