"""Common attributes of all kinds of devices."""

from __future__ import annotations

from dataclasses import dataclass

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.common.units import parse_bytes


@dataclass(frozen=True)
class Device:
    """One device.

    Parameters
    ----------
    id : str
        Its name in the user interface: ``cpu:0``, ``cuda:1``.
    kind : DeviceKind
    name : str
        User-facing name, as returned by ``torch.cuda.get_device_name()``.
    memory_total : int
        Bytes that all sessions together may use.
    threads : int
        Compute threads of a software device; 0 for a GPU.
    torch_device : str
        Torch's name of it in a worker: ``cpu``, or ``cuda:0``, the only GPU that a worker sees.
    capability : int
        Compute capability of a GPU: 100 times its major number, plus the minor one; 0 if unknown.
    processors : int
        Number of multiprocessors of a GPU; 0 if unknown.
    node : str
        Path of a GPU's device file, such as ``/dev/nvidia0``. The daemon that locks it owns the GPU
        (see `kernelproxy.devices.locks`). "" if there is none: each daemon has its own software
        devices.
    visible : str
        UUID of a GPU: its worker's ``CUDA_VISIBLE_DEVICES``. "" for a software device.
    memory_physical : int
        Bytes of a GPU, with those that sessions may not use; 0 for a software device.
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
    visible: str = ""
    memory_physical: int = 0

    def computes_like(self, other: Device) -> bool:
        """Return True if the same log gives the same bytes on both, each time it is executed.

        A GPU is not like itself: some of its kernels add in any order.
        """
        software = self.kind is other.kind is DeviceKind.SOFTWARE
        return software and self.threads == other.threads


def memory_size(text: str) -> int:
    """Read the size of a device's memory, such as ``4GiB``.

    Raises
    ------
    DeviceError
        If it is not a size.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise DeviceError(str(error)) from None
