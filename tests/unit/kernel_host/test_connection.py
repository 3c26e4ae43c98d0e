"""Endpoints of kernels: those that clients get, and the private ones behind them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.zmq_proxy.connection import CHANNELS, official, private, renumber, saved

INFO: dict[str, Any] = {
    "ip": "127.0.0.1",
    "transport": "tcp",
    "key": "secret",
    "signature_scheme": "hmac-sha256",
    "kernel_name": "python3",
    **{f"{channel}_port": 5000 + number for number, channel in enumerate(CHANNELS)},
}


def test_a_private_file_differs_only_in_its_location(tmp_path: Path) -> None:
    where = private(official(INFO))
    path = tmp_path / "kernel.json"
    path.write_text("longer than what will be there" * 100)
    path.chmod(0o600)
    where.write(path, INFO)
    found = json.loads(path.read_bytes())
    assert path.stat().st_mode & 0o777 == 0o600
    assert {k for k in INFO if found[k] == INFO[k]} >= {"key", "transport", "kernel_name"}
    assert official(found) == where
    assert where.ip.startswith("127.")
    assert len(set(where.ports.values())) == 5
    for channel in CHANNELS:
        with socket.create_server((where.ip, where.ports[channel])):
            pass


@pytest.mark.parametrize(
    ("different", "why"),
    [({"transport": "ipc"}, "transport is ipc"), ({"curve_publickey": "x"}, "encrypted")],
)
def test_a_connection_that_cannot_be_held_is_refused(different: dict[str, Any], why: str) -> None:
    with pytest.raises(ProcessError, match=why):
        official({**INFO, **different})


def test_files_beside_images_contain_no_key(tmp_path: Path) -> None:
    where = official(INFO)
    where.save(tmp_path)
    (file,) = tmp_path.iterdir()
    assert b"secret" not in file.read_bytes()
    found = saved(tmp_path)
    assert (found.ip, found.ports, found.key) == (where.ip, where.ports, b"")


@pytest.mark.parametrize("text", ["", "[]", '{"ip": "x", "ports": {"shell": 1}}', "{"])
def test_a_damaged_file_beside_images_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "connection.json").write_text(text)
    with pytest.raises(ProcessError, match="damaged"):
        saved(tmp_path)


def test_only_ports_that_are_taken_get_other_numbers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        taken = {one.getsockname()[1], two.getsockname()[1]}
        found = renumber(taken)
        assert set(found) == taken
        assert not set(found.values()) & taken
        assert len(set(found.values())) == 2
    with socket.socket() as free:  # no process listens there, and no other one can bind it
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("", 0))
        assert renumber({free.getsockname()[1]}) == {}
