"""``jupyter sing doctor``: checks what works on this machine, and what is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError, ProcessError, SingError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.options import OPTIONS, PREFIX
from kernelproxy.common.units import bytes_text
from kernelproxy.criu import mode_probe
from kernelproxy.devices import configured_devices
from kernelproxy.devices.locks import owner
from kernelproxy.native import build


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Parameters
    ----------
    name : str
    state : str
        ``ok``, ``missing`` (something optional is missing) or ``broken``.
    text : str
        Result, or what to do.
    """

    name: str
    state: str
    text: str


def examine(python: str = sys.executable) -> list[Finding]:
    """Run all checks; never raises.

    Parameters
    ----------
    python : str
        Interpreter whose torch is checked.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "settings": _settings,
        "provisioner": _provisioner,
        "panels": _panels,
        "torch": lambda: _torch(python),
        "compiler": _compiler,
        "devices": _devices,
        "memory": _memory,
        "processes": _processes,
        "daemon": _daemon,
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except (SingError, OSError) as error:
            findings.append(Finding(name, "broken", str(error)))
    return findings


def _settings() -> Iterator[Finding]:
    """Yield a finding for each variable that is not an option, or has a value that is not allowed.

    Nothing if there is none.
    """
    known = {each.variable: each for each in OPTIONS if each.has_variable}
    for name in sorted(each for each in os.environ if each.startswith(PREFIX)):
        try:
            known[name].read()
        except KeyError:
            text = f"{name} is not a setting of this version: see docs/settings.md"
            yield Finding("settings", "missing", text)
        except ControlError as error:
            yield Finding("settings", "broken", str(error))


def _provisioner() -> Iterator[Finding]:
    names = {each.name for each in entry_points(group="jupyter_client.kernel_provisioners")}
    if "sing" in names:
        yield Finding("provisioner", "ok", "the kernel provisioner `sing` is installed")
    else:
        yield Finding(
            "provisioner",
            "broken",
            "jupyter_sing is not installed in this environment: run pip install",
        )


def _panels() -> Iterator[Finding]:
    from jupyter_core.paths import jupyter_path  # programs also run without Jupyter

    for directory in jupyter_path("labextensions", "jupyter-sing"):
        if Path(directory, "package.json").is_file():
            yield Finding("panels", "ok", f"JupyterLab loads them from {directory}")
            return
    text = "not installed: install jupyter_sing again, with Node 20 or newer"
    yield Finding("panels", "missing", text)


def _torch(python: str) -> Iterator[Finding]:
    info = build.find_torch(python)
    build.check_version(info)
    yield Finding("torch", "ok", f"{info.version} in {info.directory}")


def _compiler() -> Iterator[Finding]:
    command = os.environ.get("CXX", "g++").split()[0]
    found = shutil.which(command)
    if found:
        yield Finding(
            "compiler", "ok", f"{found} can build GPU support for other versions of torch"
        )
    else:
        text = (
            f"{command} not found: only versions of torch with prebuilt GPU support can use the GPU"
        )
        yield Finding("compiler", "missing", text)


def _devices() -> Iterator[Finding]:
    for device in configured_devices():
        text = f"{device.id}: {device.name}, {bytes_text(device.memory_total)}"
        try:
            who = owner(device)
        except OSError as error:
            # On WSL, for example, GPUs work but have no device files.
            why = f"cannot be locked ({error}): another daemon may use it at the same time"
            yield Finding("device", "missing", f"{text}, {why}")
        else:
            yield Finding("device", "ok", f"{text}, used by {who}" if who else text)


def _memory() -> Iterator[Finding]:
    with open("/proc/meminfo", encoding="ascii") as file:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file}
    available = bytes_text(kilobytes["MemAvailable"] * 1024)
    yield Finding("memory", "ok", f"{available} of host memory for suspended sessions and programs")


def _processes() -> Iterator[Finding]:
    # Not cached: the user may just have installed what was missing.
    try:
        found = mode_probe.find(paths.runtime_dir(), fresh=True)
    except ProcessError as error:
        yield Finding("processes", "missing", str(error))
        return
    how = {"root": "as root", "user": "in a user namespace"}[found.kind]
    yield Finding("processes", "ok", f"can be saved {how}, with {found.criu}")


def _daemon() -> Iterator[Finding]:
    try:
        with connect(start=False):
            yield Finding("daemon", "ok", f"listens at {paths.socket_path()}")
    except ControlError as error:
        if error.reason != "no-daemon":
            raise
        yield Finding("daemon", "ok", "not running: it starts with the first notebook")
