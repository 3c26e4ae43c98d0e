"""Evictions and migrations that make room for a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jupyter_sing.scheduler.decisions import Evict, MigrateMemory
from jupyter_sing.scheduler.queue.device_table import DeviceTable
from jupyter_sing.scheduler.queue.issued import IssuedDecisions
from jupyter_sing.scheduler.queue.residency import NO_VICTIMS, RoomPlan, room
from jupyter_sing.scheduler.state import EngineDevice, EngineSession

MIGRATION_PAUSE = 60.0
"""Seconds between two migrations of the same session."""


class Evictions:
    """Makes room on devices."""

    def __init__(self, table: DeviceTable, issued: IssuedDecisions) -> None:
        self._table = table
        self._issued = issued

    def plan(
        self,
        session: EngineSession,
        devices: Sequence[EngineDevice],
        beyond: Sequence[tuple[EngineSession, EngineDevice]],
        now: float,
    ) -> list[RoomPlan] | None:
        """Plan the room for a session on each of its devices; None if it cannot fit.

        `beyond`: memory that leaves anyway, since a quota is exceeded.
        """
        spared = tuple(other for other, _ in beyond)
        plans = []
        for device in devices:
            freed = sum(other.residents[s] for s, other in beyond if other is device)
            plan = room(session, device, now, freed=freed, spared=spared)
            if plan is None:
                return None
            plans.append(plan)
        return plans

    def migrate_or_evict(
        self, victim: EngineSession, device: EngineDevice, session: EngineSession, now: float
    ) -> None:
        """Move the memory of an idle session to another device that has room, or to the host."""
        size = device.residents[victim]
        may_move = (
            victim.residency.bound is None
            and victim.gang is None  # of a gang, only a part of the ranks may be here
            and now - victim.residency.migrated_at >= MIGRATION_PAUSE
        )
        if may_move and len(victim.residency.homes) == 1:
            for other in self._table.free.roomiest(1):
                if room(victim, other, now) == NO_VICTIMS:
                    victim.residency.moving[device] = other
                    other.put(victim, size)
                    self._table.free.update(other)
                    victim.residency.migrated_at = now
                    self._issued.migrations += 1
                    self._issued.append(
                        MigrateMemory(
                            victim.id, device.id, other.id, f"makes room for {session.id}"
                        )
                    )
                    return
        self.evict(victim, device, session)

    def evict(self, victim: EngineSession, device: EngineDevice, session: EngineSession) -> None:
        """Take the memory of an idle session off a device."""
        victim.residency.moving[device] = None
        size = device.residents[victim]
        self._issued.evictions += 1
        to: Literal["host", "disk"] = (
            "host" if self._table.host.try_park(victim, device.node, size) else "disk"
        )
        self._issued.append(Evict(victim.id, device.id, to, f"makes room for {session.id}"))
