"""The policy that was applied last: kept beside the daemon's socket, for the next daemon."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from jupyter_sing.controller.effective_policy import HostPolicy
from jupyter_sing.controller.guarantees import Nodes
from jupyter_sing.scheduler.policy.yaml_reader import TEXT_BYTES_MAX
from kernelproxy.common.errors import ControlError
from kernelproxy.common.options import POLICY
from kernelproxy.common.ownership import check_file

log = logging.getLogger(__name__)

NAME = "policy.yaml"
#: Environment variable with the path of a policy that is applied at each start of the daemon.
VARIABLE = POLICY.variable


def keep(directory: Path, text: str) -> None:
    """Save a policy in place of the previous one, atomically.

    Raises
    ------
    ControlError
        If it cannot be written.
    """
    path = directory / NAME
    temporary = directory / f".{NAME}.{secrets.token_hex(4)}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise ControlError(f"The policy cannot be kept in {path}: {error}", "failed") from error


def kept(directory: Path) -> str:
    """Return the policy that was applied last; empty if none was.

    Raises
    ------
    ControlError
        If there is one and it cannot be read.
    """
    try:
        return _read(directory / NAME)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise ControlError(
            f"The policy in {directory / NAME} cannot be read: {error}", "bad-policy"
        ) from error


def _read(path: Path, remedy: str = "remove it") -> str:
    check_file(path, remedy)
    with open(path, "rb") as file:
        return file.read(TEXT_BYTES_MAX + 1).decode("utf-8")


def begin(directory: Path, nodes: Nodes) -> HostPolicy:
    """Return the policy with which a daemon starts.

    It is the file that the environment variable names, which is then also saved; else the policy
    that was applied last. Where a policy was saved, no error in a policy ends the daemon: sessions
    would end with it.

    Raises
    ------
    ControlError
        If the file that the variable names cannot be used, and no policy was applied before.
    """
    if named := os.environ.get(VARIABLE):
        try:
            text = _read(_absolute(named), f"name a copy of your own in {VARIABLE}")
            rules = HostPolicy(text, nodes)
            keep(directory, text)
            return rules
        except (ControlError, OSError, ValueError) as error:
            problem = f"{VARIABLE}: {named}: {error}"
            if not (directory / NAME).exists():
                raise ControlError(problem, "bad-policy") from None
            log.warning("%s The policy that was applied last holds.", problem)
    try:
        return HostPolicy(kept(directory), nodes)
    except ControlError as error:
        log.warning("The policy that was applied last cannot hold: %s", error)
    with suppress(ControlError):
        return HostPolicy(kept(directory), nodes, guarantee=False)
    return HostPolicy("", nodes)


def _absolute(name: str) -> Path:
    if not os.path.isabs(name):
        raise ControlError("The path must be absolute: a daemon works in no directory.")
    return Path(name)
