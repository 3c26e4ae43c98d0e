"""Reports to the daemon that this process is one rank of a job, when its default group is made.

The ranks agree on an id for the job by the store over which they have met, so that no other job has
it, whatever address and port they were given. A rank that has no session yet reports when it opens
one.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernelproxy.common import paths
from kernelproxy.common.errors import SingError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import JoinJob
from kernelproxy.kernel.activation import state

#: Of the store of the default group.
_KEY = "jupyter_sing/job"
#: Backends for tests, whose ranks are not processes.
_WITHOUT_PROCESSES = ("fake", "threaded")
_ANSWER_SECONDS_MAX = 120.0


def install(watch: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Called before torch is imported; `watch` runs a function after a module's import."""
    watch("torch.distributed.distributed_c10d", report_groups)


def report_groups(c10d: ModuleType) -> None:
    """Wrap the function that makes the default group.

    Parameters
    ----------
    c10d : module
        ``torch.distributed.distributed_c10d``.
    """
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        store = c10d._get_default_store()
        if store is None or c10d.get_backend() in _WITHOUT_PROCESSES:
            return
        name = store.compare_set(_KEY, "", secrets.token_hex(8)).decode()
        state.current().job = (name, c10d.get_rank(), c10d.get_world_size())
        if state.current().link is not None:
            send()

    c10d.__dict__["init_process_group"] = init_process_group


def send() -> None:
    """Report the job, if this process is in one and has a session; a failure is one line."""
    here = state.current()
    if here.job is None:
        return
    try:
        with connect(start=False, path=paths.socket_path()) as control:
            control.call(JoinJob(here.session, *here.job), _ANSWER_SECONDS_MAX)
    except (SingError, OSError) as error:
        print(
            "jupyter_sing: the daemon does not know that this process is a rank of a job: "
            f"{str(error).rstrip('.')}.",
            file=sys.stderr,
        )
