"""The zygotes of all users."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable

from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.workers.zygotes import Zygotes
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.peer import Owner

#: Different sets of groups, and homes, of a user for which there may be zygotes at a time.
_IDENTITIES_MAX = 32


class UserZygotes:
    """The zygotes of all users: of the daemon's own user alone, or of each user with sessions.

    Parameters
    ----------
    settings : AgentSettings
    on_change : callable
        Called with an interpreter when the progress of its compilation has changed.
    """

    def __init__(
        self, settings: AgentSettings, on_change: Callable[[str], object] = lambda python: None
    ) -> None:
        self._settings, self._on_change = settings, on_change
        self._of: dict[Owner | None, Zygotes] = {}

    def of(self, owner: Owner | None) -> Zygotes:
        """Return the zygotes that run as a user; None: as the daemon.

        Raises
        ------
        ControlError
            If a user comes with more sets of groups or homes than any real user has.
        """
        if owner is None:
            return self._of.setdefault(None, Zygotes(self._settings, on_change=self._on_change))
        if owner not in self._of:
            same = [each for each in self._of if each is not None and each.uid == owner.uid]
            if len(same) >= _IDENTITIES_MAX:
                raise ControlError(
                    "You have used too many different groups lately: try again in a minute.",
                    "too-many",
                )
            crowd = functools.partial(self._crowd, owner.uid)
            self._of[owner] = Zygotes(self._settings, owner, crowd, self._on_change)
        return self._of[owner]

    def _crowd(self, uid: int) -> int:
        """Return the number of a user's zygotes, in all groups that they were in."""
        return sum(len(z) for each, z in self._of.items() if each is not None and each.uid == uid)

    def retire_unused(self, used: Iterable[tuple[Owner | None, str]]) -> None:
        """End the zygotes of users and interpreters that are not among `used`."""
        pythons: dict[Owner | None, set[str]] = {}
        for owner, python in used:
            pythons.setdefault(owner, set()).add(python)
        for owner, zygotes in list(self._of.items()):
            zygotes.retire_unused(pythons.get(owner, set()))
            if not zygotes and owner not in pythons:
                del self._of[owner]

    def unused(self, used: Iterable[tuple[Owner | None, str]]) -> bool:
        """Return True if there are zygotes of users and interpreters that are not in `used`."""
        pythons = {(owner, os.path.abspath(python)) for owner, python in used}
        return any((o, python) not in pythons for o, z in self._of.items() for python in z.pythons)

    async def close(self) -> None:
        """End all zygotes."""
        await asyncio.gather(*(each.close() for each in self._of.values()))
