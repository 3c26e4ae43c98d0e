"""Activation: makes ``import torch`` in a kernel find a device session behind ``cuda``.

Needs the standard library only, so that it works in environments that have torch but not us.

    activate()            with SING_SESSION set: watch for the import of torch
    ├ agent_connection.py till that import: how the daemon reaches a notebook
    └ import_hook.py      at that import: native client, session, then torch itself
      ├ native_client.py  the native client's C functions
      └ ../torch_cuda     names of ``torch._C`` that CPU wheels lack, and what is patched in torch

Until torch begins to execute, any failure means: one plain line, and torch as it is.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelproxy.common.protocol import Wish
    from kernelproxy.kernel.activation.agent_connection import Link, Woken
    from kernelproxy.kernel.activation.native_client import NativeClient

__all__ = ["Activation", "activate", "cell", "current"]

# Whoever is activated leaves its process id here, so that a process which inherits the variables
# of a kernel does not become a second client of the kernel's session.
CLIENT_VARIABLE = "SING_CLIENT"


@dataclass
class Activation:
    """What activation came to in this process.

    Parameters
    ----------
    session : str
        Id of the session, "" if there is none.
    reason : str
        Why torch runs on CPU only, "" if it does not (or was not imported yet).
    client : NativeClient or None
        The native client, once torch was imported and joined the session.
    cells : int
        Cells that run now.
    cells_ended : int
        Cells that have ended before there was a client.
    listening : Link or None
        What hears the daemon in a notebook, until torch is imported.
    link : Link or None
        The client's connection.
    """

    session: str = ""
    reason: str = ""
    client: NativeClient | None = None
    cells: int = 0
    cells_ended: int = 0
    listening: Link | None = None
    link: Link | None = None


_lock = threading.Lock()
_current = Activation()
#: Carries out the daemon's wishes, in a notebook; called in a thread of ours.
on_wish: Callable[[Wish], object] | None = None
#: Told, before the session is joined again, that this process was made of images.
on_restored: Callable[[Woken], object] | None = None


def current() -> Activation:
    """Return what activation came to in this process."""
    return _current


def activate() -> bool:
    """Proxy the torch that this process is going to import, if it is the kernel of a session.

    Called once, early: by the IPython extension in kernels, by ``jupyter sing run`` in programs.
    Without ``SING_SESSION`` (or ``SING_REASON``, see below) it does nothing at all.

    Returns
    -------
    bool
        Whether torch is going to be proxied.

    Notes
    -----
    ``SING_REASON`` says why this kernel has no session although it was meant to have one; it is
    shown when torch is imported, which is when its user is concerned.
    """
    session, reason = os.environ.get("SING_SESSION", ""), os.environ.get("SING_REASON", "")
    if not (session or reason) or _current.session or _current.reason:
        return bool(_current.session and not _current.reason)
    if os.environ.get(CLIENT_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return False
    os.environ[CLIENT_VARIABLE] = str(os.getpid())
    _leave_python_path()
    from kernelproxy.kernel.activation import import_hook

    _current.session = session
    if not session:
        _current.reason = reason
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        _current.reason = "CUDA_VISIBLE_DEVICES hides all devices"
    elif "torch" in sys.modules:
        explain("torch was imported before the device session could be joined")
        return False
    sys.meta_path.insert(0, import_hook.TorchFinder(_current))
    return not _current.reason


def explain(reason: str) -> None:
    """Say, in one plain line, why torch has no device here."""
    _current.reason = reason
    print(f"jupyter_sing: CPU only: {reason}.", file=sys.stderr)


def cell(change: int) -> None:
    """Count a cell that begins (1) or ends (-1), whether or not torch was imported yet."""
    with _lock:
        _current.cells += change
        if _current.client is not None:
            _current.client.cell(change)
        elif change < 0:
            _current.cells_ended += 1
            if _current.listening is not None:
                _current.listening.tell_cells(_current.cells_ended)


def cell_asked() -> None:
    """Another cell was asked for: in the middle of one, say so. Never waits; in any thread."""
    link = _current.link
    if _current.cells and link is not None:
        link.tell_asked()


def joined(client: NativeClient) -> None:
    """Called by the hook when the session was joined, perhaps in the middle of a cell."""
    with _lock:
        _current.client = client
        for _ in range(_current.cells):
            client.cell(1)
        listening, _current.listening = _current.listening, None
    if listening is not None:
        listening.end()


def listen() -> None:
    """Hear the daemon in a notebook from now on, not only once torch is imported.

    Called by the IPython extension, in kernels; until torch is imported, this also tells how many
    cells have ended.
    """
    from kernelproxy.common import paths
    from kernelproxy.common.protocol import Listen
    from kernelproxy.kernel.activation.agent_connection import Link

    # If there is no daemon any more, whoever imports torch is told.
    link = Link(-1, Listen(_current.session), paths.socket_path(), lambda: None)
    os.register_at_fork(after_in_child=link.disown)
    with _lock:
        _current.listening = link
    link.start()


def restored(woken: Woken) -> None:
    """Called by the link: this process was made of the images of another one.

    Raises
    ------
    InternalError
        If it cannot be another one.
    """
    from kernelproxy.common.errors import InternalError

    _current.session = os.environ["SING_SESSION"] = woken.session
    if on_restored is not None:
        try:
            on_restored(woken)
        except Exception as error:
            raise InternalError(
                f"A restored kernel cannot take its place: {type(error).__name__}: {error}."
            ) from error


def _leave_python_path() -> None:
    """Take our directory out of PYTHONPATH: child processes are no business of ours."""
    ours = os.path.abspath(__file__)
    for _ in range(4):
        ours = os.path.dirname(ours)
    bundle = os.environ.pop("SING_BUNDLE", ours)
    sys.path.append(os.path.join(bundle, "beside.ours"))  # see `paths.beside`
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in entries if entry and entry != bundle]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)
