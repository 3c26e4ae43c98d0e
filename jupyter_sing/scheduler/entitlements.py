"""Requests to the guarantees, and what each virtual cluster could still have by them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from jupyter_sing.scheduler.decisions import (
    Bound,
    Guarantees,
    NoPlacement,
    RequestError,
    Victims,
)
from jupyter_sing.scheduler.ids import DeviceId
from jupyter_sing.scheduler.state import EngineDevice, EngineSession


class Entitlements:
    """The guarantees, as leases use them; answers of `Guarantees.free` are cached."""

    def __init__(self, guarantees: Guarantees) -> None:
        self._guarantees = guarantees
        self._free: dict[str, int] = {}

    def below(self, vc: str, gpus: int) -> bool:
        """True if a virtual cluster could have this many guaranteed devices now."""
        known = self._free.get(vc)
        if known is None:
            known = self._free[vc] = self._guarantees.free(vc)
        return known >= gpus

    def place(
        self, session: EngineSession, prefer: Sequence[DeviceId], *, asked: bool
    ) -> Bound | Victims | NoPlacement:
        """Find devices for a session: within the guarantee if possible, else borrowed.

        `asked`: it has a reservation that the guarantees have made.
        """
        priority = 0 if self.below(session.vc, session.gpus) or asked else -1
        place, vc, gpus = self._guarantees.place, session.vc, session.gpus
        answer = place(session.id, vc, priority, gpus, prefer)
        if isinstance(answer, NoPlacement) and priority == 0:
            answer = place(session.id, vc, -1, gpus, prefer)
        self._free.clear()
        return answer

    def place_on(self, session: EngineSession, device: DeviceId) -> Bound | None:
        """Give a session exactly this device; None if the guarantees forbid that."""
        priority = 0 if self.below(session.vc, 1) else -1
        answer = self._guarantees.place(session.id, session.vc, priority, 1, [device])
        if isinstance(answer, Bound) and answer.devices == (device,):
            self._free.clear()
            return answer
        if not isinstance(answer, NoPlacement):
            self.undo(session, answer)
        return None

    def release(self, session: EngineSession) -> None:
        """Release what a session holds."""
        self._guarantees.release(session.id)
        self._free.clear()

    def cancel(self, session: EngineSession) -> None:
        """Cancel the reservation of a session."""
        self._guarantees.cancel(session.id)
        self._free.clear()

    def undo(self, session: EngineSession, answer: Bound | Victims) -> None:
        """Give back what `place` has returned."""
        if isinstance(answer, Bound):
            self.release(session)
        else:
            self.cancel(session)

    def set_health(self, device: EngineDevice, good: bool) -> None:
        """Mark a device as usable or not."""
        with suppress(RequestError):  # no cell contains it, so no guarantee can give it out
            self._guarantees.set_health(device.id, good)
        self._free.clear()

    def replace(self, guarantees: Guarantees) -> None:
        """Use other guarantees; `adopt` tells them what is held."""
        self._guarantees = guarantees
        self._free.clear()

    def adopt(self, session: EngineSession) -> None:
        """Record that a session holds its devices already, by right or not."""
        names = [device.id for device in session.lease.devices]
        kept = self._guarantees.adopt(session.id, session.vc, names)
        session.lease.right = session.vc if kept else ""

    def widest(self) -> int:
        """Return the number of devices that one request could have at most."""
        return self._guarantees.widest()
