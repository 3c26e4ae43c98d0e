"""The random streams of a process: Python's, NumPy's, torch's and the device's."""

from __future__ import annotations

import random
import sys
from typing import Any

from kernelproxy.hoststate.parts import DevicePart, Omission


def states(device: DevicePart | None) -> dict[str, Any]:
    """States of the streams that the process has."""
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.get_state(legacy=False)
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = bytes(torch.get_rng_state().tolist())
    if device is not None:
        found["device"] = [bytes(state) for state in device.rng_states()]
    return found


def put_back(found: dict[str, Any], device: DevicePart | None) -> list[Omission]:
    """Let the streams of this process go on where those of another one were.

    Returns
    -------
    list of Omission
        Streams that this process does not have.
    """
    problems = []
    random.setstate(found["random"])
    if "numpy" in found:
        import_of("numpy.random").set_state(found["numpy"])
    if "torch" in found:
        torch = import_of("torch")
        torch.set_rng_state(torch.frombuffer(bytearray(found["torch"]), dtype=torch.uint8))
    if found.get("device"):
        if device is None:
            problems.append(Omission("random numbers", "the device's: there is no device session"))
        else:
            device.set_rng_states(found["device"])
    return problems


def import_of(name: str) -> Any:
    """A module whose absence is somebody else's affair to name."""
    __import__(name)
    return sys.modules[name]
