"""The real daemon over toy zygotes.

Run with ``python -m tests.doubles.daemon.daemon READY_FD SETTINGS_JSON``.

Optional keys beside the settings:

- ``die_at``: the first agent kills itself at the moment with this number. A moment is right before
  or right after an externally visible change: a deposit, or a change of an agent page.
- ``moments``: a file for the number of moments so far.
- ``objects``: a file to which SIGUSR2 writes how many objects there are.
- ``devices_after``: devices of the agents that follow the first one.
- ``hurry``: while this file exists, a worker may take one second for an order; otherwise as long as
  a loaded machine needs.
- ``stays``: the daemon does not exit by itself.
- ``quantum``: sessions take turns of this many seconds.
- ``engine``: the scheduler decides, with these settings, and writes into the file ``audit`` who
  holds a lease.
- ``nodes``: files that stand for those of GPUs in /dev, one for each device.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_sing.controller import Controller
from jupyter_sing.scheduler.settings import EngineSettings as EngineSettings
from kernelproxy.agent.api import daemon
from kernelproxy.agent.api.daemon import Daemon, run
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.process.sandbox_probe import SandboxProbe
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.agent.supervisor.fdstore import FdStore
from kernelproxy.common.scheduler_api import Arbiter
from kernelproxy.common.shared_memory import AgentPage
from kernelproxy.devices import Device, configured_devices
from tests.doubles.daemon.audit import Audited
from tests.doubles.daemon.turns import Turns


def count_moments(die_at: int, moments: str) -> None:
    """Kill this process at the moment with number `die_at`."""
    counted = itertools.count(1)

    def moment() -> None:
        number = next(counted)
        if moments:
            Path(moments).write_text(str(number))
        if number == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def between_moments(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*arguments: Any) -> Any:
            moment()
            result = function(*arguments)
            moment()
            return result

        return wrapped

    FdStore._send = between_moments(FdStore._send)  # type: ignore[method-assign]
    AgentPage.ring = between_moments(AgentPage.ring)  # type: ignore[method-assign]


def count_objects(path: Path) -> None:
    """Write how many sessions, and objects of the garbage collector, are in memory."""
    found = gc.get_objects()
    numbers = sum(isinstance(each, Session) for each in found), len(found)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(numbers))
    partial.rename(path)


hurry = Path("/nonexistent")


class HurriedSettings(AgentSettings):
    """Settings with short limits while a file exists."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("order_seconds", "snapshot_seconds") and hurry.exists():
            return 1.0
        return super().__getattribute__(name)


def main() -> int:
    global hurry
    given = {"zygote_command": ["-m", "tests.doubles.daemon.zygote"], **json.loads(sys.argv[2])}
    die_at, moments = given.pop("die_at", 0), given.pop("moments", "")
    devices_after, quantum = given.pop("devices_after", None), given.pop("quantum", None)
    hurry = Path(given.pop("hurry", hurry))
    if nodes := given.pop("nodes", []):

        def placed(text: str | None = None) -> list[Device]:
            found = configured_devices(text)
            return [replace(each, node=node) for each, node in zip(found, nodes, strict=True)]

        daemon.configured_devices = placed  # type: ignore[attr-defined]  # a name it imports
    if objects := given.pop("objects", ""):
        signal.signal(signal.SIGUSR2, lambda *_: count_objects(Path(objects)))
    if given.pop("stays", False):
        Daemon._leave_if_quiet = lambda self: None  # type: ignore[method-assign]
    # Toy kernels are not saved by CRIU. A probe would be a process of the agent, and take time.
    SandboxProbe.begin = lambda self: None  # type: ignore[method-assign]
    again = [sys.executable, "-m", "tests.doubles.daemon.daemon", "-1", sys.argv[2]]
    supervisor_fd = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    if supervisor_fd < 0:
        count_moments(die_at, moments)
    elif devices_after is not None:
        os.environ["JUPYTER_SING_DEVICES"] = devices_after
    engine, audit = given.pop("engine", None), given.pop("audit", None)
    arbiter: Arbiter | None = Turns(quantum) if quantum else None
    if engine is not None:
        settings = EngineSettings(**engine)
        arbiter = Audited(settings, Path(audit)) if audit else Controller(settings)
    return run(int(sys.argv[1]), again, supervisor_fd, HurriedSettings(**given), arbiter)


if __name__ == "__main__":
    sys.exit(main())
