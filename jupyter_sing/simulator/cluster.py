"""The devices of a simulation: memory on them, leases, and the cost of moving memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jupyter_sing.scheduler.ids import DeviceId, SessionId
from jupyter_sing.scheduler.settings import DeviceSpec
from jupyter_sing.simulator.fragmentation import fragment
from jupyter_sing.simulator.workload import GB


class SimulationError(RuntimeError):
    """A scheduler decided the impossible: two holders of a device, more bytes than fit, …"""


@dataclass(frozen=True)
class SimulatedCluster:
    """The hardware.

    Parameters
    ----------
    gpus : int
    memory : int
        Bytes of each.
    bandwidth : float
        Bytes per second between a device and its host, one direction at a time.
    switch : float
        Seconds that loading a session takes besides its bytes.
    suspend : float
        Seconds from the order to close a gate until the device is free: about half an operator.
    disk_bandwidth : float
        Bytes per second of spilled state.
    gpus_per_node : int
    names : tuple of (str, str)
        Node and name of each device; without them ``node0`` with ``node0/gpu0`` and so on.
    copy_behind : bool
        True if memory on a device is copied to the host while its session does not execute. Its
        eviction then only has to write what is not copied yet.
    """

    gpus: int
    memory: int = 24 * GB
    bandwidth: float = 20.0 * GB
    switch: float = 0.1
    suspend: float = 0.01
    disk_bandwidth: float = 2.0 * GB
    gpus_per_node: int = 8
    names: tuple[tuple[str, str], ...] = ()
    copy_behind: bool = True

    def devices(self) -> tuple[DeviceSpec, ...]:
        """Return the devices as the engine receives them."""
        size = self.gpus_per_node
        names = self.names or tuple(
            (f"node{i // size}", f"node{i // size}/gpu{i % size}") for i in range(self.gpus)
        )
        return tuple(
            DeviceSpec(
                id=name,
                memory=self.memory,
                node=node,
                bytes_per_second=self.bandwidth,
                constant_seconds=self.switch,
            )
            for node, name in names
        )


@dataclass
class _State:
    """One device."""

    node: str
    held: dict[SessionId, int] = field(default_factory=dict)  # bytes
    used: int = 0
    holders: dict[SessionId, int] = field(default_factory=dict)  # tokens of leases
    packed: frozenset[SessionId] = frozenset()
    link_free: float = 0.0


class SimulatedDevices:
    """All devices of a simulation; refuses impossible decisions.

    Parameters
    ----------
    cluster : SimulatedCluster
    classes : sequence of (int, float)
        Number of devices that a cell needs, and the share of the cells that need so many.
    """

    def __init__(self, cluster: SimulatedCluster, classes: Sequence[tuple[int, float]]) -> None:
        self.cluster, self._classes = cluster, classes
        described = cluster.devices()
        self._states = {device.id: _State(device.node) for device in described}
        self._free: dict[str, int] = {}
        for device in described:
            self._free[device.node] = self._free.get(device.node, 0) + 1
        self.fragmented = sum(fragment(free, classes) for free in self._free.values())

    def __getitem__(self, device: DeviceId) -> _State:
        if device not in self._states:
            raise SimulationError(f"There is no device {device}.")
        return self._states[device]

    def take(self, device: DeviceId, session: SessionId, token: int) -> None:
        """Give a session the right to execute on a device."""
        state = self[device]
        others = [other for other in state.holders if other not in state.packed]
        if state.holders and (others or session not in state.packed):
            holder = next(iter(state.holders))
            raise SimulationError(f"{device} was granted to {session} while {holder} has it.")
        if not state.holders:
            self._count(state.node, -1)
        state.holders[session] = token

    def give(self, device: DeviceId, session: SessionId) -> None:
        """Take that right back."""
        state = self[device]
        del state.holders[session]
        if not state.holders:
            self._count(state.node, 1)

    def load(self, device: DeviceId, session: SessionId, size: int) -> None:
        """Reserve room for a session's memory."""
        state = self[device]
        if state.used + size > self.cluster.memory:
            names = ", ".join(state.held)
            raise SimulationError(f"{session} does not fit on {device} beside {names}.")
        state.held[session] = size
        state.used += size

    def size(self, device: DeviceId, session: SessionId) -> int:
        """Return the bytes that a session has on a device."""
        return self[device].held.get(session, 0)

    def unload(self, device: DeviceId, session: SessionId) -> None:
        """Free the room of a session's memory."""
        state = self[device]
        state.used -= state.held.pop(session)

    def transfer(self, device: DeviceId, now: float, seconds: float) -> float:
        """Occupy the link of a device, after earlier transfers; return when it is done."""
        state = self[device]
        state.link_free = max(now, state.link_free) + seconds
        return state.link_free

    def _count(self, node: str, change: int) -> None:
        before = fragment(self._free[node], self._classes)
        self._free[node] += change
        self.fragmented += fragment(self._free[node], self._classes) - before
