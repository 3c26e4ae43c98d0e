"""Settings of the process that cells change, and that affect other cells' results.

Only what notebooks commonly set, and only of libraries that are imported: the environment and the
working directory, the random streams, and a few switches of NumPy, torch, pandas and matplotlib.
"""

from __future__ import annotations

import decimal
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernelproxy.kernel.activation import python_path
from kernelproxy.kernel.namespace.types import DevicePart, Omission

#: Environment variables that belong to a kernel, and not to its notebook.
_OF_KERNEL = ("SING_", "JUPYTER_", "JPY_", "PYDEVD_", "IPY_", "MPLBACKEND")


def random_streams(device: DevicePart | None) -> dict[str, Any]:
    """Return the states of the process's random streams."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.get_state(legacy=False)
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = bytes(torch.get_rng_state().tolist())
    if device is not None:
        found["device"] = [bytes(state) for state in device.rng_states()]
    return found


def put_back_random_streams(found: dict[str, Any], device: DevicePart | None) -> Iterator[Omission]:
    """Restore the states of the random streams; yield those that cannot be restored."""
    random.setstate(found["random"])
    if "numpy" in found:
        _module("numpy.random").set_state(found["numpy"])
    if "torch" in found:
        torch = _module("torch")
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
    if found.get("device") and device is None:
        yield Omission("random numbers", "the device's: this kernel has no device session")
    elif device is not None and "device" in found:
        device.set_rng_states(found["device"])


def settings() -> dict[str, Any]:
    """Return the settings that cells have changed, as far as they are known here."""
    found: dict[str, Any] = {
        "directory": _directory(),
        "environment": _environment(),
        "decimal": decimal.getcontext().copy(),
        "recursion": sys.getrecursionlimit(),
    }
    for name, (read, _) in _LIBRARIES.items():
        if (module := sys.modules.get(name)) is not None:
            found[name] = read(module)
    return found


def put_back_settings(found: dict[str, Any]) -> Iterator[Omission]:
    """Restore the settings that cells had changed; yield those that cannot be set here."""
    try:
        os.chdir(found["directory"])
    except OSError as error:
        yield Omission("working directory", f"{found['directory']}: {error.strerror}")
    for name, value in found["environment"].items():
        if name == python_path.NAME:
            python_path.set_users_part(value or "")
        elif value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    decimal.setcontext(found["decimal"])
    sys.setrecursionlimit(found["recursion"])
    for name, (_, write) in _LIBRARIES.items():
        if name in found:
            try:
                write(_module(name), found[name])
            except Exception as error:  # another version of the library, or none
                yield Omission(f"settings of {name}", f"{type(error).__name__}: {error}")


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # deleted meanwhile
        return "/"


def _environment() -> dict[str, str | None]:
    """Return variables that this process has set or, with None, unset since its start."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    initial = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    now, bundle, name = dict(os.environ), initial.get("SING_BUNDLE", ""), python_path.NAME
    for each in (initial, now):
        each[name] = python_path.users_part(each.get(name, ""), bundle)
    changed = {
        name: now.get(name) for name in initial.keys() | now if initial.get(name) != now.get(name)
    }
    return {name: value for name, value in changed.items() if not name.startswith(_OF_KERNEL)}


def _module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


# ---------------------------------------------------------------- libraries


def _read_numpy(numpy: Any) -> Any:
    printed = numpy.get_printoptions()
    printed.pop("override_repr", None)
    return {"errors": numpy.geterr(), "printed": printed}


def _write_numpy(numpy: Any, found: Any) -> None:
    numpy.seterr(**found["errors"])
    known = numpy.get_printoptions()
    numpy.set_printoptions(**{k: v for k, v in found["printed"].items() if k in known})


def _read_torch(torch: Any) -> Any:
    return {
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "anomalies": torch.is_anomaly_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _write_torch(torch: Any, found: Any) -> None:
    torch.set_default_dtype(found["dtype"])
    if str(torch.get_default_device()) != found["device"]:
        torch.set_default_device(None if found["device"] == "cpu" else found["device"])
    torch.set_grad_enabled(found["grad"])
    torch.use_deterministic_algorithms(found["deterministic"])
    if torch.get_float32_matmul_precision() != found["precision"]:
        torch.set_float32_matmul_precision(found["precision"])
    torch.autograd.set_detect_anomaly(found["anomalies"])
    torch.backends.cudnn.benchmark = found["benchmark"]


def _read_pandas(pandas: Any) -> Any:
    found: dict[str, Any] = {}

    def walk(place: Any, prefix: str) -> None:
        for name, value in place.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            elif isinstance(value, str | int | float | bool | None):
                found[prefix + name] = value

    walk(pandas.options.d, "")
    return found


def _write_pandas(pandas: Any, found: Any) -> None:
    for name, value in found.items():
        if pandas.get_option(name) != value:
            pandas.set_option(name, value)


def _read_matplotlib(matplotlib: Any) -> Any:
    # The backend is the kernel's, and reading it would choose one.
    return {name: value for name, value in dict.items(matplotlib.rcParams) if name != "backend"}


def _write_matplotlib(matplotlib: Any, found: Any) -> None:
    for name, value in found.items():
        if name in matplotlib.rcParams:
            matplotlib.rcParams[name] = value


_LIBRARIES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "numpy": (_read_numpy, _write_numpy),
    "torch": (_read_torch, _write_torch),
    "pandas": (_read_pandas, _write_pandas),
    "matplotlib": (_read_matplotlib, _write_matplotlib),
}
