"""The real daemon over toy zygotes: ``python -m tests.doubles.daemon READY_FD SETTINGS_JSON``.

Beside settings there may be ``die_at``: the first agent kills itself when it has come to that many
moments at which somebody else learns something of it, a deposit or a change of an agent page (each
has a moment before and one after it). ``moments`` is a file for their number so far, and
``devices_after`` are the devices that the agents after it find.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelproxy.agent.daemon import run
from kernelproxy.agent.deposits import Deposits
from kernelproxy.agent.settings import Settings
from kernelproxy.oplog import AgentPage


def count_moments(die_at: int, moments: str) -> None:
    """Kill this process at one of its moments."""
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

    Deposits._send = between_moments(Deposits._send)  # type: ignore[method-assign]
    AgentPage.ring = between_moments(AgentPage.ring)  # type: ignore[method-assign]


def main() -> int:
    given = {"zygote_command": ["-m", "tests.doubles.zygote"], **json.loads(sys.argv[2])}
    die_at, moments = given.pop("die_at", 0), given.pop("moments", "")
    devices_after = given.pop("devices_after", None)
    again = [sys.executable, "-m", "tests.doubles.daemon", "-1", sys.argv[2]]
    keeper_fd = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    if keeper_fd < 0:
        count_moments(die_at, moments)
    elif devices_after is not None:
        os.environ["JUPYTER_SING_DEVICES"] = devices_after
    return run(int(sys.argv[1]), again, keeper_fd, Settings(**given))


if __name__ == "__main__":
    sys.exit(main())
