"""Options of jupyter_sing: one table, with the name, variable, type, default and meaning of each.

The traits of the server extension and of the provisioner, the daemon's settings and the table in
docs/settings.md are made from it, or compared with it by a test. A variable is named
``JUPYTER_SING_`` and the option's name.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kernelproxy.common.errors import ControlError
from kernelproxy.common.units import parse_bytes

PREFIX = "JUPYTER_SING_"


class Kind(StrEnum):
    """Type and unit of an option's value."""

    SECONDS = "a number of seconds"
    COUNT = "a number"
    BYTES = "a size"
    SWITCH = "on or off"
    PATH = "a path"
    TEXT = "a text"


class Reader(StrEnum):
    """Process that reads an option, or class that has it as a trait."""

    SERVER = "SingExtension"
    PROVISIONER = "SingProvisioner"
    DAEMON = "daemon"
    ANY = "all"


@dataclass(frozen=True)
class Option:
    """One option.

    Parameters
    ----------
    name : str
        Of traits and of the daemon's settings.
    kind : Kind
    default : float or int or str or bool or None
        Value if it is not set; None: it is computed, as `usual` says.
    help : str
        What it does, for users.
    readers : set of Reader
    usual : str
        The default in words, if `default` does not say it.
    pages : str
        Page of docs/ that explains it.
    has_variable : bool
        False: it is only a trait.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    readers: frozenset[Reader]
    usual: str = ""
    page: str = ""
    has_variable: bool = True

    @property
    def variable(self) -> str:
        """Return the name of its environment variable."""
        return PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """Return its default in words."""
        if self.usual or not isinstance(self.default, bool):
            return self.usual or (f"{self.default:g}" if self.default != "" else "")
        return "on" if self.default else "off"

    def text(self, environment: Mapping[str, str] | None = None) -> str | None:
        """Return the text of its variable; None if it is not set."""
        return (os.environ if environment is None else environment).get(self.variable)

    def parse(self, text: str) -> Any:
        """Return the value that a text stands for.

        Raises
        ------
        ControlError
            ``bad-request``, if there is none: one line with the variable, the text and what is
            allowed.
        """
        try:
            return _PARSERS[self.kind](text)
        except ValueError:
            raise ControlError(
                f"{self.variable} is {text!r}: not {self.kind}. Write {_EXAMPLES[self.kind]}.",
                "bad-request",
            ) from None

    def read(self, environment: Mapping[str, str] | None = None) -> Any:
        """Return the value of its variable, else its default.

        Raises
        ------
        ControlError
            As `parse`.
        """
        text = self.text(environment)
        return self.default if text is None else self.parse(text)

    def read_or(self, fallback: Any, log: logging.Logger) -> Any:
        """Return the value of its variable; if it is unset, empty or invalid, return `fallback`.

        If it is invalid, log a warning: an option must not prevent a kernel from starting.
        """
        if not (text := self.text()):
            return fallback
        try:
            found = self.parse(text)
            if not isinstance(found, float) or abs(found) < sys.maxsize:
                return found
            log.warning("%s is %r: not a finite number. It is ignored.", self.variable, text)
        except ControlError as error:
            log.warning("%s It is ignored.", error)
        return fallback

    def is_on(self) -> bool:
        """Return whether a switch is on; an empty variable counts as one that is not set."""
        return bool(self.read() if self.text() else self.default)


def _seconds(text: str) -> float:
    seconds = float(text)
    if math.isnan(seconds):
        raise ValueError
    return min(seconds, float(sys.maxsize))


def _count(text: str) -> int:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return int(number)


def _switch(text: str) -> bool:
    return text.strip().lower() not in ("0", "false", "no", "off")


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    Kind.SECONDS: _seconds,
    Kind.COUNT: _count,
    Kind.BYTES: parse_bytes,
    Kind.SWITCH: _switch,
    Kind.PATH: str,
    Kind.TEXT: str,
}
_EXAMPLES: Mapping[Kind, str] = {
    Kind.SECONDS: "a number, such as 600",
    Kind.COUNT: "a number, such as 3",
    Kind.BYTES: "4GiB, 512MiB or a number of bytes",
}

_SERVER, _PROVISIONER, _DAEMON = Reader.SERVER, Reader.PROVISIONER, Reader.DAEMON


def _option(
    name: str, kind: Kind, default: Any, readers: Iterable[Reader], text: str, **more: Any
) -> Option:
    return Option(name, kind, default, text, frozenset(readers), **more)


IDLE_TIMEOUT = _option(
    "idle_timeout", Kind.SECONDS, 600.0, (_SERVER, _PROVISIONER, _DAEMON),
    "Seconds without use after which a session is suspended; 0: never. A policy's time cannot be "
    "made longer.",
    usual="the policy's value, else 600",
)  # fmt: skip
HIBERNATE_TIMEOUT = _option(
    "hibernate_timeout", Kind.SECONDS, 0.0, (_SERVER, _PROVISIONER),
    "Seconds without use after which a notebook is hibernated: its GPU memory and, where possible, "
    "its process are moved to disk; 0: never.",
    page="checkpoints.md#hibernation",
)  # fmt: skip
CHECKPOINT_EVERY = _option(
    "checkpoint_every", Kind.SECONDS, 0.0, (_SERVER, _PROVISIONER),
    "Seconds between two automatic checkpoints of a notebook that runs cells; 0: not by time.",
    page="checkpoints.md",
)  # fmt: skip
CHECKPOINT_CELLS = _option(
    "checkpoint_cells", Kind.COUNT, 0, (_SERVER, _PROVISIONER),
    "Cells between two automatic checkpoints; 0: not by number of cells.",
    page="checkpoints.md",
)  # fmt: skip
CHECKPOINT_KEEP = _option(
    "checkpoint_keep", Kind.COUNT, 3, (_SERVER, _PROVISIONER),
    "Number of automatic checkpoints of a notebook that are kept; at least one.",
    page="checkpoints.md",
)  # fmt: skip
COLD_AFTER = _option(
    "cold_after", Kind.SECONDS, 3600.0, (_SERVER, _DAEMON),
    "Seconds without use after which a suspended state is spilled to disk; 0: never.",
)  # fmt: skip
HOST_MEMORY = _option(
    "host_memory", Kind.BYTES, None, (_SERVER, _DAEMON),
    "Host memory for logs and suspended states, such as 16GiB. If more is used, the states that "
    "were unused for longest are spilled to disk.",
    usual="half of the machine's memory, or of its container's",
)  # fmt: skip
DISK_QUOTA = _option(
    "disk_quota", Kind.BYTES, 64 << 30, (_SERVER, _DAEMON),
    "Disk space for spilled states, checkpoints and hibernating kernels, such as 100GiB; 0: "
    "nothing is written to disk.",
    usual="64GiB",
)  # fmt: skip
CONTEXT_POOL = _option(
    "context_pool", Kind.SWITCH, True, (_DAEMON,),
    "Whether a GPU with much free memory has a CUDA context in advance, so that the next session "
    "starts or resumes there sooner.",
    page="gpu.md#context-pool",
)  # fmt: skip
SEATS = _option(
    "seats", Kind.SWITCH, True, (_DAEMON,),
    "Whether the ranks of a job that are on the same simulated GPU share one process there.",
    page="jobs.md#one-process-for-the-ranks-on-a-simulated-gpu",
)  # fmt: skip
POLICY = _option(
    "policy", Kind.PATH, "", (_SERVER, _DAEMON),
    "Policy file, which sets which users may use which devices; applied when the daemon starts.",
    usual="the policy applied last", page="policy.md",
)  # fmt: skip
KEEP_KERNELS = _option(
    "keep_kernels", Kind.SECONDS, 86400.0, (_SERVER,),
    "Seconds for which kernels keep running without a server after it was ended by a signal or "
    "died; a new server reattaches them. 0: they end with the server.",
    page="processes.md#kernels-outlive-their-server",
)  # fmt: skip
DEVICE = _option(
    "device", Kind.TEXT, "", (_PROVISIONER,), "Id of the device to use, such as cuda:0.",
    usual="the daemon chooses", has_variable=False,
)  # fmt: skip
OPEN_TIMEOUT = _option(
    "open_timeout", Kind.SECONDS, 20.0, (_PROVISIONER,),
    "Seconds to wait for the daemon at kernel start.", has_variable=False,
)  # fmt: skip
TRACK_FILES = _option(
    "track_files", Kind.SWITCH, True, (_PROVISIONER,),
    "Whether to track which files a kernel changes, so that checkpoints contain them (by "
    "LD_PRELOAD).",
    page="files.md",
)  # fmt: skip
SAVE_PROCESS = _option(
    "save_process", Kind.SWITCH, True, (_PROVISIONER,),
    "Whether kernels start in a sandbox, so that their processes can be saved, where CRIU works.",
    page="processes.md",
)  # fmt: skip
DIRECT_GPU = _option(
    "direct_gpu", Kind.SWITCH, False, (_PROVISIONER,),
    "Whether kernels may also use the GPU directly, beside their session, for libraries other than "
    "torch. What they use there is not suspended and has no session.",
    page="libraries.md#the-gpu-beside-a-session",
)  # fmt: skip
HEADLESS = _option(
    "headless", Kind.SWITCH, True, (Reader.ANY,),
    "Whether kernels that no server starts (jupyter execute, jupyter console, nbclient, "
    "papermill) have a device.",
)  # fmt: skip
DEVICES = _option(
    "devices", Kind.TEXT, "auto", (_DAEMON,),
    "`auto`, or a list such as `cpu:4GiB,cpu:4GiB@2` (`@2`: compute threads) or "
    "`cuda:0,cuda:1:20GiB`.",
    usual="auto", page="gpu.md",
)  # fmt: skip
DETERMINISTIC = _option(
    "deterministic", Kind.SWITCH, False, (_DAEMON,),
    "Whether new sessions use deterministic algorithms, so that their state after a recovery is "
    "exact on a GPU, too. Some operations are slower then. Users can change it for a session.",
    page="gpu.md#what-is-exact",
)  # fmt: skip
LINGER = _option(
    "linger", Kind.SECONDS, 300.0, (_DAEMON,),
    "Seconds without sessions after which the daemon exits.",
)  # fmt: skip
USER = _option(
    "user", Kind.TEXT, "", (Reader.ANY,), "The user that policies name.",
    usual="`JUPYTERHUB_USER`, else the system's user name", page="policy.md",
)  # fmt: skip
CRIU = _option(
    "criu", Kind.PATH, "criu", (Reader.ANY,),
    "The program that saves processes; if empty, no process is saved.",
    usual="`criu` on the path", page="processes.md",
)  # fmt: skip
NATIVE_DIR = _option(
    "native_dir", Kind.PATH, "/var/cache/jupyter-sing/native", (Reader.ANY,),
    "Where `jupyter sing build` stores the libraries for all users.",
    usual="`/var/cache/jupyter-sing/native`", page="system.md",
)  # fmt: skip
RUNTIME_DIR = _option(
    "runtime_dir", Kind.PATH, "", (Reader.ANY,), "Directory of the daemon's socket and log.",
    usual="`sing` in Jupyter's runtime directory",
)  # fmt: skip
DATA_DIR = _option(
    "data_dir", Kind.PATH, "", (Reader.ANY,), "Directory of checkpoints and spilled sessions.",
    usual="`sing` in Jupyter's data directory",
)  # fmt: skip
SYSTEM_DIR = _option(
    "system_dir", Kind.PATH, "/run/jupyter-sing", (Reader.ANY,),
    "Directory of the socket of the machine's daemon.",
    usual="`/run/jupyter-sing`", page="system.md",
)  # fmt: skip
ANY_TORCH = _option(
    "any_torch", Kind.TEXT, "", (Reader.ANY,),
    "1: try a version of torch that is not supported.", usual="only supported versions",
)  # fmt: skip

OPTIONS = tuple(each for each in list(vars().values()) if isinstance(each, Option))


def options_of(reader: Reader) -> tuple[Option, ...]:
    """Return the options that a process reads, or a class has as traits."""
    return tuple(each for each in OPTIONS if reader in each.readers)


def user() -> str:
    """Return the user of this process: ``JUPYTER_SING_USER``, ``JUPYTERHUB_USER``, else ""."""
    return USER.text() or os.environ.get("JUPYTERHUB_USER") or ""
