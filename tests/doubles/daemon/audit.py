"""Live controller that records who holds a lease, according to the engine and to the agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jupyter_sing.controller import Controller
from jupyter_sing.scheduler.events import Event
from jupyter_sing.scheduler.settings import EngineSettings
from kernelproxy.common.scheduler_api import Actions


class Audited(Controller):
    """Records, after each event, the leases of both, and leases that only the agent has.

    Parameters
    ----------
    settings : EngineSettings
    path : Path
        Of the file, in JSON.
    """

    def __init__(self, settings: EngineSettings, path: Path) -> None:
        super().__init__(settings)
        self._path, self._wrong = path, list[Any]()
        if path.exists():  # of an agent that died
            self._wrong = json.loads(path.read_text())["wrong"]

    def begin(self, actions: Actions, devices: dict[str, int]) -> None:
        super().begin(actions, devices)
        send = self._driver.send

        def audited(event: Event) -> None:
            send(event)
            self._audit(event)

        self._driver.send = audited  # type: ignore[method-assign]

    def _audit(self, event: Event) -> None:
        if self._driver._busy:
            return
        held = self.held()
        sessions: Any = self._actions._sessions  # type: ignore[attr-defined]
        agent = {
            each.id: (each.core.allocator.device.id, each.lease._token)
            for each in sessions.values()
            if each.lease._token is not None
        }
        self._wrong += [[type(event).__name__, *each] for each in agent.items() - held.items()]
        text = json.dumps({"engine": held, "agent": agent, "wrong": self._wrong})
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.rename(self._path)
