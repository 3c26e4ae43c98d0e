"""Starts the ranks of ``jupyter sing run --nproc-per-node``, as torchrun does.

``python -m kernelproxy.kernel.activation.jobs.run_ranks STARTER RANKS SCRIPT [ARGS...]``

This process uses no device, and has no session; each rank opens its own. STARTER is the process id
of ``jupyter sing run``: if that is killed, torchrun ends the ranks, and if this process is killed,
the ranks end, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.activation import leave_python_path
from kernelproxy.kernel.activation.child_session import LAUNCHER_VARIABLE
from kernelproxy.kernel.activation.state import CLIENT_VARIABLE

_SIGNAL_AT_END_OF_PARENT = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Start the ranks, and exit when all have ended: with the status of the first that failed."""
    if len(sys.argv) < 4:
        raise SystemExit(
            "usage: python -m kernelproxy.kernel.activation.jobs.run_ranks STARTER RANKS SCRIPT "
            "[ARGS...]"
        )
    starter, ranks, *program = sys.argv[1:]
    _end_with(int(starter))
    leave_python_path(children=bool(os.environ.get("SING_SOCKET")))
    os.environ[CLIENT_VARIABLE] = os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    if not gpu_access.is_direct():
        gpu_access.hide()
    raise SystemExit(_run(["--standalone", "--nproc-per-node", ranks, *program]))


def _end_with(starter: int) -> None:
    """Have this process terminated when the process that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_END_OF_PARENT, signal.SIGTERM)
    try:
        os.kill(starter, 0)
    except ProcessLookupError:  # it ended before that
        raise SystemExit(128 + signal.SIGTERM) from None


def _run(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit status, 128 + n if signal n ended a rank or this process."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv[:] = ["torchrun", *arguments]  # its own errors name it
    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # a table of the ranks that failed
        status = int(error.get_first_failure()[1].exitcode)
        return status if status >= 0 else 128 - status
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    main()
