"""Where a kernel listens: the ports that its clients know, and those of its process."""

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
#: What a directory of images has beside them: where the process in it listens.
FILE_NAME = "connection.json"


@dataclass(frozen=True)
class Connection:
    """Where to reach a kernel, and the key of its messages.

    Parameters
    ----------
    ip : str
    ports : dict
        TCP port of each of `CHANNELS`.
    key : bytes
        Signs messages; empty: they are not signed.
    scheme : str
        How; Jupyter's ``signature_scheme``.
    """

    ip: str
    ports: Mapping[str, int]
    key: bytes
    scheme: str = "hmac-sha256"

    def url(self, channel: str) -> str:
        """What zmq binds or connects to."""
        return f"tcp://{self.ip}:{self.ports[channel]}"

    def at(self, ip: str, ports: Mapping[str, int]) -> Connection:
        """Return the same kernel elsewhere."""
        return replace(self, ip=ip, ports=ports)

    def write(self, path: Path, info: Mapping[str, Any]) -> None:
        """Write a connection file like the one that `info` is from, for the owner alone."""
        ports = {f"{channel}_port": port for channel, port in self.ports.items()}
        whole = {**info, **ports, "ip": self.ip, "key": self.key.decode()}
        _write(path, json.dumps({**whole, "signature_scheme": self.scheme}, indent=1))

    def save(self, directory: Path) -> None:
        """Put it beside images. The key is not in it: it is the restored kernel's new one."""
        _write(directory / FILE_NAME, json.dumps({"ip": self.ip, "ports": dict(self.ports)}))


def official(info: Mapping[str, Any]) -> Connection:
    """Read what a kernel manager says about its kernel.

    Raises
    ------
    ProcessError
        If a kernel that is reached like this cannot be hidden behind a switchboard.
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
    """Choose where the kernel's process is to listen.

    It gets a loopback address of its own: there, nobody takes a port between its choice and its
    use, and restored processes find theirs free.
    """
    a, b, c = secrets.token_bytes(3)
    for ip in (f"127.{a or 1}.{b}.{1 + c % 254}", "127.0.0.1"):
        try:
            return replace(like, ip=ip, ports=dict(zip(CHANNELS, _free(ip), strict=True)))
        except OSError:
            continue  # not all containers have the whole network
    raise ProcessError("there is no free port on the loopback interface", "unavailable")


def saved(directory: Path) -> Connection:
    """Read what `Connection.save` has put beside images.

    Raises
    ------
    ProcessError
        If it is not there, or is something else.
    """
    try:
        found = parse_json((directory / FILE_NAME).read_bytes())
        ports = {channel: int(found["ports"][channel]) for channel in CHANNELS}
        return Connection(str(found["ip"]), ports, b"")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProcessError(f"{directory / FILE_NAME} is damaged: {error!r}", "restore") from error


def renumber(listening: set[int]) -> dict[int, int]:
    """Find other ports for those that are in use here.

    Parameters
    ----------
    listening : set of int
        On which a process listens that is to be restored.

    Returns
    -------
    dict
        New numbers by old ones, of those that cannot stay as they are.
    """
    taken = [port for port in sorted(listening) if not _is_free(port)]
    return dict(zip(taken, _free("", len(taken)), strict=True))


def _free(ip: str, count: int = len(CHANNELS)) -> list[int]:
    """Numbers of ports that nobody listens on, all different."""
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
    """Whether a port can be listened on, whatever the address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True


def _write(path: Path, text: str) -> None:
    """Make or replace a file for its owner alone."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        file.write(text)
