"""A user's preferences for a session: whether it is pinned, its tier, and exact recovery.

Note [Pinning]: the memory of a pinned session stays on its device. It is not suspended for
idleness, no other session can evict it, only its owner can migrate it, and it does not hibernate.
It gets leases like all others. Its owner may still suspend it: then it gives up its memory like
any other session, and is pinned again where it resumes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from kernelproxy.agent.session.core import Inhibitor, SessionCore
from kernelproxy.agent.state.device_state import DeviceState
from kernelproxy.common.errors import ControlError
from kernelproxy.common.scheduler_api import TIERS, Arbiter, SessionDescription
from kernelproxy.common.untrusted import parse_json

log = logging.getLogger(__name__)

REMEMBERED_MAX = 1000


class Preferences:
    """The preferences for one session, and for its kernel's next session after a restart.

    Parameters
    ----------
    core : SessionCore
    state : DeviceState
    arbiter : Arbiter
    """

    def __init__(self, core: SessionCore, state: DeviceState, arbiter: Arbiter) -> None:
        self.pinned = False
        #: The tier it asks for; None: no preference.
        self.tier: str | None = None
        #: True if its workers use deterministic algorithms, so that recovery is exact.
        self.deterministic = bool(state.memory.agent.deterministic)
        self._core, self._state, self._arbiter = core, state, arbiter
        core.inhibitors[Inhibitor.PIN] = lambda: self.pinned

    def terms(self) -> SessionDescription:
        """Return the session's description for the scheduler."""
        core = self._core
        used = min(self._state.memory.client.memory_used, core.allocator.ledger.total)
        bound = core.request.device is not None
        device = core.allocator.device.id
        return SessionDescription(
            core.id, core.name, core.owner, device, used, bound, core.user, self.pinned, self.tier
        )

    def pin(self, pinned: bool) -> None:
        """Pin the session to its device, or unpin it.

        Raises
        ------
        ControlError
            If the session has ended, or its user is not allowed to.
        """
        self._core.check_usable()
        self._change(pinned, self.tier)

    def set_deterministic(self, on: bool) -> None:
        """Switch deterministic algorithms, from the next operators on; raises as `pin`."""
        self._core.check_usable()
        self._set_deterministic(on)

    def _set_deterministic(self, on: bool) -> None:
        self.deterministic = on
        self._state.memory.agent.deterministic = int(on)

    def prefer(self, level: str) -> None:
        """Ask for a tier; raises as `pin`."""
        self._core.check_usable()
        if level not in TIERS:
            known = ", ".join(TIERS)
            raise ControlError(f"There is no priority {level!r}, only {known}.", "bad-request")
        self._change(self.pinned, level)

    def _change(self, pinned: bool, tier: str | None) -> None:
        before = self.pinned, self.tier
        if (pinned, tier) == before:
            return
        self.pinned, self.tier = pinned, tier
        try:
            self._arbiter.changed(self.terms())
        except ControlError:
            self.pinned, self.tier = before
            raise
        self._core.persist()
        # Its own timers and others' reasons to wait depend on it.
        for allocator in self._core.allocator.allocators:
            for each in allocator.tenants.values():
                each.request_reconcile()

    @property
    def anything(self) -> bool:
        """True if there is any preference."""
        return self.pinned or self.tier is not None or self.deterministic

    def record(self) -> dict[str, Any]:
        """Return what `recover` needs, as JSON."""
        return {
            "pinned": self.pinned,
            "tier": self.tier,
            "deterministic": self.deterministic,
        }

    def recover(self, record: dict[str, Any]) -> None:
        """Recover from the record of an agent that died."""
        self._take(record["pinned"], record["tier"])
        self._set_deterministic(record.get("deterministic", self.deterministic))

    def continue_from(self, before: Preferences) -> None:
        """Take over the preferences of a kernel that another process replaces."""
        self.recover(before.record())

    def inherit(self, parent: Preferences) -> None:
        """Take over the preferences of the session whose process has started this one's.

        A pin is not inherited: it is about the memory of one session.
        """
        self._take(False, parent.tier)
        self._set_deterministic(parent.deterministic)

    def _take(self, pinned: bool, tier: str | None) -> None:
        """Re-apply earlier preferences, dropping those the policy no longer allows."""
        for wanted in ((pinned, tier), (pinned, None)):
            with contextlib.suppress(ControlError):
                self._change(*wanted)
                return


class RememberedPreferences:
    """Preferences for sessions that have closed: a restarted kernel keeps its id and gets another
    session, maybe of another daemon.

    Parameters
    ----------
    path : Path
        Its file, which only the daemon's user can write. What cannot be written or read is lost,
        with a warning in the log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = self._read()

    def keep(self, owner: int, kernel_id: str, record: dict[str, Any]) -> None:
        """Remember a record for a user's kernel; the oldest records are dropped."""
        self._records.pop(_key(owner, kernel_id), None)
        self._records[_key(owner, kernel_id)] = record
        while len(self._records) > REMEMBERED_MAX:
            del self._records[next(iter(self._records))]
        self._write()

    def take(self, owner: int, kernel_id: str) -> dict[str, Any] | None:
        """Return the record for the kernel's next session, and forget it."""
        record = self._records.pop(_key(owner, kernel_id), None)
        if record is not None:
            self._write()
        return record

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = parse_json(self._path.read_bytes())
            return {
                str(key): {
                    "pinned": bool(each["pinned"]),
                    "tier": each["tier"],
                    "deterministic": bool(each.get("deterministic")),
                }
                for key, each in found.items()
                if each["tier"] is None or each["tier"] in TIERS
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("Pins and priorities of closed sessions are forgotten: %s", error)
            return {}

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump(self._records, file)
            partial.rename(self._path)
        except OSError as error:
            log.warning("Pins and priorities of closed sessions may be forgotten: %s", error)


def _key(owner: int, kernel_id: str) -> str:
    return f"{owner} {kernel_id}"
