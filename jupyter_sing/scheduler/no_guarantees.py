"""`Guarantees` that guarantee nothing: every device is free for any request.

Fairness alone decides which session comes first. For hosts without virtual clusters.
"""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_sing.scheduler.decisions import Bound, NoPlacement, Victims
from jupyter_sing.scheduler.ids import DeviceId


class NoGuarantees:
    """One pool of devices, all opportunistic. See `Guarantees` for the contract."""

    def __init__(self, devices: Sequence[DeviceId]) -> None:
        self._free = dict.fromkeys(devices)
        self._count = len(self._free)
        self._bad: set[DeviceId] = set()
        self._held: dict[str, tuple[DeviceId, ...]] = {}

    def place(
        self, request: str, vc: str, priority: int, leaves: int, prefer: Sequence[DeviceId]
    ) -> Bound | Victims | NoPlacement:
        """Take preferred devices that are free, then the first free ones."""
        del vc, priority  # they give no precedence here
        chosen = [device for device in prefer if device in self._free][:leaves]
        if len(chosen) < leaves:
            known = set(chosen)
            for device in self._free:
                if device not in known:
                    chosen.append(device)
                    if len(chosen) == leaves:
                        break
        if len(chosen) < leaves:
            return NoPlacement(f"{leaves} devices are needed, {len(self._free)} are free")
        for device in chosen:
            del self._free[device]
        self._held[request] = tuple(chosen)
        return Bound(tuple(chosen), guaranteed=False)

    def release(self, request: str) -> None:
        """Release what the request holds; no effect if it holds nothing."""
        for device in self._held.pop(request, ()):
            if device not in self._bad:
                self._free[device] = None

    def cancel(self, request: str) -> None:
        """Do nothing: nothing is ever reserved here."""

    def set_health(self, device_or_node: str, good: bool) -> None:
        """Remove a device from the pool, or return it."""
        if good:
            self._bad.discard(device_or_node)
            if not any(device_or_node in held for held in self._held.values()):
                self._free[device_or_node] = None
        else:
            self._bad.add(device_or_node)
            self._free.pop(device_or_node, None)

    def free(self, vc: str) -> int:
        """Return 0: nothing is guaranteed."""
        del vc
        return 0

    def adopt(self, request: str, vc: str, devices: Sequence[DeviceId]) -> bool:
        """Take exactly these devices."""
        del vc
        for device in devices:
            self._free.pop(device, None)
        self._held[request] = tuple(devices)
        return False

    def widest(self) -> int:
        """Return the number of all devices."""
        return self._count
