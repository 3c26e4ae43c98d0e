"""Addresses of a kernel: the ports that its clients use, and those of its process."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelproxy.common.errors import ProcessError
from kernelproxy.common.untrusted import parse_json

CHANNELS = ("shell", "control", "stdin", "hb", "iopub")
#: File in a directory of images with the addresses at which their process listens.
FILE_NAME = "connection.json"


@dataclass(frozen=True)
class Connection:
    """Addresses of a kernel, and the key of its messages.

    Parameters
    ----------
    ip : str
    ports : dict
        TCP port of each of `CHANNELS`.
    key : bytes
        Key of message signatures; empty: messages are not signed.
    scheme : str
        Signature scheme; Jupyter's ``signature_scheme``.
    """

    ip: str
    ports: Mapping[str, int]
    key: bytes
    scheme: str = "hmac-sha256"

    def url(self, channel: str) -> str:
        """Return the URL that ZeroMQ binds or connects to."""
        return f"tcp://{self.ip}:{self.ports[channel]}"

    def at(self, ip: str, ports: Mapping[str, int]) -> Connection:
        """Return the same kernel at other addresses."""
        return replace(self, ip=ip, ports=ports)

    def write(self, path: Path, info: Mapping[str, Any]) -> None:
        """Write a connection file like the one that `info` is from, readable only by the owner."""
        ports = {f"{channel}_port": port for channel, port in self.ports.items()}
        whole = {**info, **ports, "ip": self.ip, "key": self.key.decode()}
        _write(path, json.dumps({**whole, "signature_scheme": self.scheme}, indent=1))

    def save(self, directory: Path) -> None:
        """Write it beside images, without the key: a restored kernel gets a new key."""
        _write(directory / FILE_NAME, json.dumps({"ip": self.ip, "ports": dict(self.ports)}))


def official(info: Mapping[str, Any]) -> Connection:
    """Parse the connection information of a kernel manager.

    Raises
    ------
    ProcessError
        If a kernel with this kind of connection cannot be behind a ZMQ proxy.
    """
    transport = info.get("transport", "tcp")
    if transport != "tcp":
        raise ProcessError(f"the kernel's transport is {transport}, not tcp", "unavailable")
    if info.get("curve_publickey"):
        raise ProcessError("its connections are encrypted (transport_encryption)", "unavailable")
    ports = {channel: int(info[f"{channel}_port"]) for channel in CHANNELS}
    key = info.get("key", b"")
    scheme = info.get("signature_scheme", "hmac-sha256")
    return Connection(info["ip"], ports, key if isinstance(key, bytes) else key.encode(), scheme)


def private(like: Connection) -> Connection:
    """Choose the addresses at which the kernel's process will listen.

    It gets a loopback address of its own: there, no other process takes a port between its choice
    and its use, and restored processes find their ports free.
    """
    a, b, c = secrets.token_bytes(3)
    for ip in (f"127.{a or 1}.{b}.{1 + c % 254}", "127.0.0.1"):
        try:
            return replace(like, ip=ip, ports=dict(zip(CHANNELS, _free(ip), strict=True)))
        except OSError:
            continue  # some containers do not have the whole loopback network
    raise ProcessError("there is no free port on the loopback interface", "unavailable")


def saved(directory: Path) -> Connection:
    """Read the file that `Connection.save` has written beside images.

    Raises
    ------
    ProcessError
        If it is missing or damaged.
    """
    try:
        found = parse_json((directory / FILE_NAME).read_bytes())
        ports = {channel: int(found["ports"][channel]) for channel in CHANNELS}
        return Connection(str(found["ip"]), ports, b"")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProcessError(f"{directory / FILE_NAME} is damaged: {error!r}", "restore") from error


def renumber(listening: set[int]) -> dict[int, int]:
    """Find new ports for those that are in use here.

    Parameters
    ----------
    listening : set of int
        Ports on which the process to be restored listens.

    Returns
    -------
    dict
        New ports by old ones, for those in use.
    """
    taken = [port for port in sorted(listening) if not _is_free(port)]
    return dict(zip(taken, _free("", len(taken)), strict=True))


def _free(ip: str, count: int = len(CHANNELS)) -> list[int]:
    """Return ports on which no process listens, all different."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.socket())
            held[-1].bind((ip, 0))
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


def _is_free(port: int) -> bool:
    """True if a port can be listened on, at all addresses."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True


def _write(path: Path, text: str) -> None:
    """Create or replace a file, readable only by its owner."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        file.write(text)
