"""Activation: makes ``import torch`` in a kernel find a device session behind ``cuda``.

Needs the standard library only, so that it works in environments that have torch but not us.

    activate()            with SING_SESSION set: hide the GPU, watch for the import of torch
    ├ gpu_libraries.py    a line at the import of libraries that would need the GPU
    ├ agent_connection.py until that import: connection over which the daemon reaches a notebook
    └ import_hook.py      at that import: native client, session, then torch itself
      ├ session_join.py   the session, perhaps later: child_session.py
      ├ native_client.py  the native client's C functions
      └ ../torch_cuda     names of ``torch._C`` that CPU wheels lack, and patches of torch

Until torch begins to execute, any failure leads to one plain line, and torch stays unchanged.
"""

from __future__ import annotations

import os
import sys

from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.activation import python_path, state
from kernelproxy.kernel.activation.state import (
    RANKS_VARIABLE,
    Activation,
    cell,
    cell_asked,
    current,
    ranks,
)

__all__ = [
    "Activation",
    "activate",
    "activate_child",
    "cell",
    "cell_asked",
    "current",
    "leave_python_path",
    "listen",
    "ranks",
    "set_ranks",
]


def activate() -> bool:
    """Proxy the torch that this process will import, if it is the kernel of a session.

    Called once, early: by the IPython extension in kernels, by ``jupyter sing run`` in programs.
    Without ``SING_SESSION`` (or ``SING_REASON``, see below) it does nothing.

    Returns
    -------
    bool
        True if torch will be proxied.

    Notes
    -----
    ``SING_REASON`` is set if this kernel has no session although it was meant to have one. The
    text is shown when torch is imported, because only then it matters to the user.
    """
    found = current()
    session, reason = os.environ.get("SING_SESSION", ""), os.environ.get("SING_REASON", "")
    if not (session or reason) or found.session or found.reason:
        return bool(found.session and not found.reason)
    if os.environ.get(state.CLIENT_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return False
    os.environ[state.CLIENT_VARIABLE] = str(os.getpid())
    leave_python_path(children=bool(session))
    from kernelproxy.kernel.activation import gpu_libraries, import_hook

    if not gpu_access.is_direct():
        gpu_access.hide()
        gpu_libraries.install(import_hook.watch)
    found.session, found.reason = session, "" if session else reason
    if session and gpu_access.hides_all(os.environ):
        found.reason = state.HIDDEN
    elif session and "torch" in sys.modules:
        state.explain("torch was imported before the device session could be joined")
        return False
    sys.meta_path.insert(0, import_hook.TorchFinder(found))
    os.register_at_fork(after_in_child=state.begin_child)
    return not found.reason


def activate_child() -> None:
    """Proxy the torch that this process will import; it opens a session when it uses the device.

    Called once, early, in processes that a kernel or a program with a session has started.
    """
    from kernelproxy.kernel.activation import gpu_libraries, import_hook

    found = current()
    found.session, found.child = os.environ.get("SING_SESSION", ""), True
    if not gpu_access.is_direct():
        gpu_access.hide_again()
        gpu_libraries.install(import_hook.watch)
    if gpu_access.hides_all(os.environ):
        found.reason = state.HIDDEN
    sys.meta_path.insert(0, import_hook.TorchFinder(found))
    os.register_at_fork(after_in_child=state.begin_child)


def listen() -> None:
    """Receive the daemon's requests in a notebook from now on, before torch is imported.

    Called by the IPython extension, in kernels; until torch is imported, this also reports how many
    cells have ended.
    """
    from kernelproxy.common import paths
    from kernelproxy.common.protocol import Listen
    from kernelproxy.kernel.activation.agent_connection import Link

    # If the daemon has ended, the user is notified when torch is imported.
    link = Link(-1, Listen(current().session), paths.socket_path(), lambda: None)
    os.register_at_fork(after_in_child=link.disown)
    state.listens(link)
    link.start()


def set_ranks(count: int) -> None:
    """Set the number of devices that this process, and those that it starts, see.

    Libraries that start one process for each device then start that many. All devices are names of
    the one device of the process's session.
    """
    os.environ[RANKS_VARIABLE] = str(count)
    if (cuda := sys.modules.get("torch.cuda")) is not None:
        cuda.__dict__["_cached_device_count"] = None


def leave_python_path(*, children: bool) -> None:
    """Remove our packages from PYTHONPATH, which child processes inherit.

    With `children`, they find there what gives them sessions of their own: see `python_path`.
    """
    ours = os.path.abspath(__file__)
    for _ in range(4):
        ours = os.path.dirname(ours)
    bundle = os.environ.pop("SING_BUNDLE", ours)
    sys.path.append(os.path.join(bundle, "beside.ours"))  # see `paths.beside`
    python_path.replace(bundle, children=children)
