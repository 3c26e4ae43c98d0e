"""Execution of a scheduler's decisions in virtual time: leases of devices, and memory on them."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_sing.scheduler.decisions import Evict, Grant, MigrateMemory, Preempt
from jupyter_sing.scheduler.events import Evicted, Moved, Released, Started
from jupyter_sing.scheduler.gangs.ranks import sizes
from jupyter_sing.scheduler.ids import DeviceId
from jupyter_sing.simulator.cluster import SimulationError
from jupyter_sing.simulator.world import SessionRun, SimulatedWorld


class SimulatedMemory:
    """Moves the memory of sessions that do not execute.

    Parameters
    ----------
    world : SimulatedWorld
    settled : callable
        Called with a session whose memory has been moved.
    """

    def __init__(self, world: SimulatedWorld, settled: Callable[[SessionRun], None]) -> None:
        self._world, self._settled = world, settled

    def dirty_seconds(self, run: SessionRun, device: DeviceId) -> float:
        """Return the seconds to copy to the host what is only on the device."""
        world = self._world
        seconds = world.devices.size(device, run.session.name) / world.cluster.bandwidth
        if world.cluster.copy_behind:
            seconds = max(0.0, seconds - (world.now - run.resident[device]))
        world.outcome.moved += int(seconds * world.cluster.bandwidth)
        return seconds

    def evict(self, run: SessionRun, evict: Evict) -> None:
        """Begin to move a session's memory off a device."""
        world = self._world
        settled = evict.device in run.resident and evict.device not in run.evicting
        if run.token is not None or not settled:
            raise SimulationError(f"{evict.session} cannot be evicted from {evict.device} now.")
        seconds = self.dirty_seconds(run, evict.device)
        run.evicting.add(evict.device)
        run.cold = evict.to == "disk"
        done = world.devices.transfer(evict.device, world.now, seconds)
        world.at(done, lambda: self._evicted(run, evict.device))

    def _evicted(self, run: SessionRun, device: DeviceId) -> None:
        world = self._world
        run.evicting.discard(device)
        world.devices.unload(device, run.session.name)
        del run.resident[device]
        world.notify(Evicted(world.now, run.session.name, device))
        self._settled(run)

    def migrate(self, run: SessionRun, move: MigrateMemory) -> None:
        """Begin to move a session's memory to another device."""
        world = self._world
        if run.token is not None or move.source not in run.resident or run.evicting:
            raise SimulationError(f"{move.session} cannot be moved from {move.source} now.")
        world.devices.load(move.target, move.session, run.session.memory)
        seconds = self.dirty_seconds(run, move.source)
        run.evicting.add(move.source)
        world.outcome.swaps += 1
        world.outcome.moved += run.session.memory
        out = world.devices.transfer(move.source, world.now, seconds)
        loading = world.cluster.switch + run.session.memory / world.cluster.bandwidth
        done = world.devices.transfer(move.target, out, loading)
        world.at(done, lambda: self._moved(run, move))

    def _moved(self, run: SessionRun, move: MigrateMemory) -> None:
        world = self._world
        run.evicting.discard(move.source)
        world.devices.unload(move.source, move.session)
        del run.resident[move.source]
        run.resident[move.target] = world.now
        world.notify(Moved(world.now, move.session, move.target))
        self._settled(run)


class SimulatedLeases:
    """Grants devices to sessions, loads their memory, and lets them execute.

    Parameters
    ----------
    world : SimulatedWorld
    memory : SimulatedMemory
    finished : callable
        Called with a session when its cell has executed completely, and its lease has ended.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        memory: SimulatedMemory,
        finished: Callable[[SessionRun], None],
    ) -> None:
        self._world, self._memory, self._finished = world, memory, finished
        self._token = 0

    def grant(self, run: SessionRun, grant: Grant) -> None:
        """Give a session devices, and begin to load its memory."""
        world = self._world
        if grant.token <= self._token:
            raise SimulationError(f"Token {grant.token} of {grant.session} is not new.")
        self._token = grant.token
        if not run.waiting or run.token is not None or run.evicting:
            raise SimulationError(f"{grant.session} was granted devices that it cannot use now.")
        count, least = len(set(grant.devices)), run.session.gpus_min
        suits = count in sizes(run.session.gpus, least, run.session.gpus) if least else False
        if count != run.session.gpus and not suits:
            raise SimulationError(f"{grant.session} was granted {len(grant.devices)} devices.")
        for device in grant.devices:
            world.devices.take(device, grant.session, grant.token)
        run.token, run.devices, run.granted = grant.token, grant.devices, world.now
        ready = self._load(run)
        world.at(ready, lambda: self._start(run, grant.token))

    def _load(self, run: SessionRun) -> float:
        """Begin to load a session onto its devices; return when it is loaded."""
        world = self._world
        name, size, cluster = run.session.name, run.size, world.cluster
        missing = {d: size - world.devices.size(d, name) for d in run.devices}
        missing = {d: more for d, more in missing.items() if more > 0 or d not in run.resident}
        for device in run.devices:
            if device not in missing and world.devices.size(device, name) > size:
                world.devices.unload(device, name)  # ranks leave it
                world.devices.load(device, name, size)
        run.leaving = tuple(device for device in run.resident if device not in run.devices)
        if not missing:
            return world.now
        bandwidth = cluster.bandwidth
        if run.cold:
            bandwidth = min(cluster.bandwidth, cluster.disk_bandwidth)
        ready = world.now
        for device in run.leaving:  # it moves: what is only there is copied to the host first
            dirty = self._memory.dirty_seconds(run, device)
            ready = world.devices.transfer(device, world.now, dirty)
        for device in missing:
            if device in run.resident:
                world.devices.unload(device, name)  # more ranks come to those that are there
            world.devices.load(device, name, size)
            run.resident[device] = world.now
        ready = max(
            world.devices.transfer(device, ready, cluster.switch + more / bandwidth)
            for device, more in missing.items()
        )
        world.outcome.moved += sum(missing.values())
        world.outcome.swaps += run.loaded
        run.loaded, run.cold = True, False
        return ready

    def _start(self, run: SessionRun, token: int) -> None:
        world = self._world
        if run.token != token or run.stopping:
            return  # it was preempted before
        self._unload_leaving(run)
        run.started = world.now
        world.outcome.switching += (world.now - run.granted) * len(run.devices)
        if run.first_started is None:
            run.first_started = world.now
        world.at(world.now + run.remaining * run.slowness, lambda: self._finish(run, token))
        world.notify(Started(world.now, run.session.name, token))

    def _finish(self, run: SessionRun, token: int) -> None:
        if run.token != token or run.started is None:
            return  # it was preempted before
        self._stop(run)
        self._finished(run)

    def preempt(self, run: SessionRun, preempt: Preempt) -> None:
        """Begin to take a session's devices."""
        world = self._world
        if run.token != preempt.token or run.stopping:
            return
        run.stopping = True
        world.outcome.preemptions += 1
        world.at(world.now + world.cluster.suspend, lambda: self._release(run, preempt.token))

    def _release(self, run: SessionRun, token: int) -> None:
        world = self._world
        if run.token != token:
            return  # its cell finished before
        if run.started is None:  # it was still being loaded, which completes in the background
            world.outcome.switching += (world.now - run.granted) * len(run.devices)
            self._unload_leaving(run)
        self._stop(run)
        world.notify(Released(world.now, run.session.name, token))

    def _unload_leaving(self, run: SessionRun) -> None:
        """Free the room on the devices that a session has left."""
        for device in run.leaving:
            self._world.devices.unload(device, run.session.name)
            del run.resident[device]
        run.leaving = ()

    def _stop(self, run: SessionRun) -> None:
        """End a lease."""
        world = self._world
        name, gpus = run.session.name, len(run.devices)
        if run.started is not None:
            executed = world.now - run.started
            run.remaining -= executed / run.slowness
            run.record.executed += executed
            run.record.note_executed(run.started, world.now)
            world.outcome.executed += executed * gpus
        world.outcome.charged += (world.now - run.granted) * gpus
        for device in run.devices:
            world.devices.give(device, name)
            run.resident[device] = world.now
        run.token, run.devices, run.started, run.stopping = None, (), None, False
