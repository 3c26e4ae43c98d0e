"""The devices that an agent owns, as configured by `JUPYTER_SING_DEVICES`."""

from __future__ import annotations

from kernelproxy.common.errors import DeviceError
from kernelproxy.common.options import DEVICES
from kernelproxy.common.shared_memory import DeviceKind
from kernelproxy.devices import cuda, software
from kernelproxy.devices.device import Device

__all__ = ["Device", "DeviceKind", "configured_devices"]


def configured_devices(text: str | None = None) -> list[Device]:
    """List the devices that a configuration names.

    Parameters
    ----------
    text : str, optional
        ``auto``, or a list such as ``cpu:4GiB,cpu:4GiB@2`` or ``cuda:0,cuda:1``; by default the
        value of ``JUPYTER_SING_DEVICES``, else ``auto``.

    Raises
    ------
    DeviceError
        If it is invalid, or names a GPU twice or one that does not exist.
    """
    if text is None:
        text = DEVICES.read()
    if text.strip() in ("", "auto"):
        return cuda.all_devices() or software.default_devices()
    devices: list[Device] = []
    for entry in (each.strip() for each in text.split(",")):
        kind, _, rest = entry.partition(":")
        if kind == "cpu":
            count = sum(each.kind is DeviceKind.SOFTWARE for each in devices)
            devices.append(software.parse(rest, count))
        elif kind == "cuda":
            devices.append(cuda.parse(rest))
        else:
            raise DeviceError(
                f"{entry!r} is not a device: {DEVICES.variable} is auto, or a list of entries "
                "such as cpu:4GiB, cpu:4GiB@2 (compute threads) or cuda:0."
            )
    repeated = {each.id for each in devices if [d.id for d in devices].count(each.id) > 1}
    if repeated:
        raise DeviceError(f"{DEVICES.variable} names {', '.join(sorted(repeated))} twice.")
    return devices
