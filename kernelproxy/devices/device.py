"""What every kind of device has."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.common.shared_memory import DeviceKind


@dataclass(frozen=True)
class Device:
    """One device.

    Parameters
    ----------
    id : str
        ``cpu:0``, ``cuda:1``: its name in the interface.
    kind : DeviceKind
    name : str
        Its name for people, as ``torch.cuda.get_device_name()`` gives it.
    memory_total : int
        Bytes that sessions may use together.
    threads : int
        Compute threads of a software device; 0 for a GPU.
    torch_device : str
        What torch calls it in a worker: ``cpu`` or ``cuda:1``.
    capability : int
        Compute capability of a GPU: 100 times its first number and the second; 0 if not known.
    processors : int
        Multiprocessors of a GPU; 0 if not known.
    node : str
        Path of a GPU's file, such as ``/dev/nvidia0``: who locks it owns the GPU (see
        `kernelproxy.devices.locks`). "" if there is none: software devices are everybody's own.
    """

    id: str
    kind: DeviceKind
    name: str
    memory_total: int
    threads: int
    torch_device: str
    capability: int = 0
    processors: int = 0
    node: str = ""
