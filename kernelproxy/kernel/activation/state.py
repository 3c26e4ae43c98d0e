"""State of activation in this process, and the handlers of cells, requests and restores.

Needs the standard library only.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kernelproxy.common.errors import InternalError
from kernelproxy.common.untrusted import parse_json
from kernelproxy.kernel import gpu_access

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelproxy.common.protocol import KernelRequest
    from kernelproxy.kernel.activation.native_client import NativeClient


@dataclass(frozen=True)
class Woken:
    """Content of the line that ends an absence.

    Parameters
    ----------
    restored : bool
        True if this process is not the one that detached, but restored from it.
    session : str
        Id of the session that it joins.
    connection_file : str
        Of the kernel that it replaces; "": the same as that of the process that detached.
    ports : dict of int to int
        New ports at which it listens, by the ports of the process that detached.
    environment : dict of str to str
        Variables whose values differ in the kernel that it replaces.
    """

    restored: bool
    session: str
    connection_file: str = ""
    ports: dict[int, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> Woken | None:
        """Parse a line; return None if it is not valid."""
        try:
            found = parse_json(line)
            return cls(
                bool(found["restored"]),
                str(found["session"]),
                str(found.get("connection_file", "")),
                {int(old): int(new) for old, new in found.get("ports", {}).items()},
                {str(name): str(text) for name, text in found.get("environment", {}).items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class AgentLine(Protocol):
    """Lasting connection to the daemon; as `agent_connection.Link`."""

    def report_cells(self, ended: int) -> None:
        """Report how many cells have ended."""

    def report_cell_request(self) -> None:
        """Report that another cell was requested while one runs."""

    def end(self) -> None:
        """Close it."""


@dataclass
class Activation:
    """State of activation in this process.

    Parameters
    ----------
    session : str
        Id of the session, "" if there is none; of a child that has not opened one: its parent's.
    child : bool
        Whether this process opens a session of its own when it uses the device.
    reason : str
        Why torch runs on CPU only, "" if it does not (or was not imported yet).
    client : NativeClient or None
        The native client, once torch was imported and joined the session.
    cells : int
        Number of cells that run now.
    cells_ended : int
        Number of cells that ended before there was a client.
    listening : Line or None
        Connection to the daemon in a notebook, until torch is imported.
    link : Line or None
        Connection of the client.
    job : tuple of str, int and int, or None
        Id, rank and number of ranks of the job of which this process is one; None: of none.
    """

    session: str = ""
    child: bool = False
    reason: str = ""
    client: NativeClient | None = None
    cells: int = 0
    cells_ended: int = 0
    listening: AgentLine | None = None
    link: AgentLine | None = None
    job: tuple[str, int, int] | None = None


#: Holds the process id of the process for which a session was opened, so that another process
#: which inherits its variables does not become a second client of that session.
CLIENT_VARIABLE = "SING_CLIENT"
#: 0: processes that a kernel or program starts or forks have no device.
CHILDREN_VARIABLE = "SING_CHILDREN"
#: Number of devices that this process, and those that it starts, see.
RANKS_VARIABLE = "SING_RANKS"
#: A reason for `explain`.
HIDDEN = "CUDA_VISIBLE_DEVICES hides all devices"

_lock = threading.Lock()
_current = Activation()
#: Carries out the daemon's requests, in a notebook; called in the link's thread.
on_request: Callable[[KernelRequest], object] | None = None
#: Called in a restored process, before the session is joined again.
on_restored: Callable[[Woken], object] | None = None


def children_have_sessions() -> bool:
    """True if processes that this one starts or forks open sessions of their own."""
    return os.environ.get(CHILDREN_VARIABLE, "") != "0"


def ranks() -> int:
    """Return the number of devices that this process sees: see `activation.set_ranks`."""
    text = os.environ.get(RANKS_VARIABLE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def begin_child() -> None:
    """Called in a forked child: what its parent has of the session is not its own."""
    global _lock, on_request, on_restored
    _lock = threading.Lock()  # perhaps held at the fork
    _current.child, _current.listening, _current.link = True, None, None
    _current.job = None
    on_request = on_restored = None
    if _current.client is None:
        return
    torch = sys.modules["torch"]
    torch.cuda._cached_device_count = None  # launchers say in each child how many there are
    # The threads of OpenMP are not in the child, and GCC's library would wait for them. Launchers
    # of processes that are not forked give each one thread, too.
    torch.set_num_threads(1)


def current() -> Activation:
    """Return the state of activation in this process."""
    return _current


def explain(reason: str) -> None:
    """Record and print, in one plain line, why torch has no session here, and thereby no device.

    A process that may use GPUs directly has them also without a session.
    """
    _current.reason = reason
    if gpu_access.is_direct():
        print(f"jupyter_sing: no session: {reason}.", file=sys.stderr)
        return
    gpu_access.hide_in(os.environ)  # a cell may have set the variable
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
                _current.listening.report_cells(_current.cells_ended)


def await_peers(waiting: int) -> None:
    """Report how this process waits for the other ranks of its job.

    Parameters
    ----------
    waiting : int
        See ``Waiting`` in ``kernel.collectives``.
    """
    if (client := _current.client) is not None:
        client.await_peers(waiting)


def copy_named(to: Any, source: Any, name: tuple[int, int], *, last: bool = False) -> None:
    """Copy a tensor between host and device, whose bytes there have this name.

    `last`: the device may give up the memory of the source, which will be overwritten as a whole.
    """
    if (client := _current.client) is None:
        to.copy_(source)
    else:
        client.copy_named(to, source, name, last)


def premultiplier(op: Any) -> Any:
    """Return the factor of a boxed ``ReduceOp`` of kind PREMUL_SUM: a number, or one in a tensor.

    Raises
    ------
    RuntimeError
        This process has no device session.
    """
    if (client := _current.client) is None:
        raise RuntimeError("PREMUL_SUM needs a device session")
    return client.premultiplier(op)


def cell_asked() -> None:
    """Report that another cell was requested while one runs. Never blocks; from any thread."""
    link = _current.link
    if _current.cells and link is not None:
        link.report_cell_request()


def joined(client: NativeClient) -> None:
    """Called by the hook when the session was joined, perhaps during a cell."""
    with _lock:
        _current.client = client
        for _ in range(_current.cells):
            client.cell(1)
        listening, _current.listening = _current.listening, None
    if listening is not None:
        listening.end()


def listens(line: AgentLine) -> None:
    """Set the connection of a notebook in which torch is not imported yet."""
    with _lock:
        _current.listening = line


def restored(woken: Woken) -> None:
    """Called by the link: this process was restored from the images of another one.

    Raises
    ------
    InternalError
        If it cannot replace the kernel.
    """
    _current.session = os.environ["SING_SESSION"] = woken.session
    if on_restored is not None:
        try:
            on_restored(woken)
        except Exception as error:
            raise InternalError(
                f"A restored kernel cannot take its place: {type(error).__name__}: {error}."
            ) from error
