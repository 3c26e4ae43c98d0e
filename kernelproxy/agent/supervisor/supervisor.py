"""The supervisor: outlives the agent, and starts the next one with all that its sessions need.

``python -m kernelproxy.agent.supervisor.supervisor FD``, started by the agent. For each session,
the agent persists a record and the descriptors of its memory here. The supervisor also holds the
listening socket, so that connections wait while there is no agent, and the daemon's locks, so that
no other daemon starts or takes its GPUs. It only receives these until its connection ends. If the
agent has not sent `Farewell` by then, it has died. If the supervisor dies instead, the agent starts
another one and persists everything again. So the sessions end only if both are ended at once.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kernelproxy.common import restart_note
from kernelproxy.common.errors import ProtocolError
from kernelproxy.common.ipc.framing import recv_message, send_message
from kernelproxy.common.protocol import Deposit, Done, Farewell, Keep, KeepDevice, Message, Withdraw
from kernelproxy.common.shared_memory import AgentPage, Presence, close_all

log = logging.getLogger(__name__)

#: For so many deaths, each within so many seconds of the agent's start, the next agent is started
#: at once; then after pauses that double, in seconds.
AT_ONCE_MAX, LIVED_SECONDS = 5, 10.0
PAUSE_MIN, PAUSE_MAX = 1.0, 30.0
#: After so many seconds in which no agent lived that long, no other one is started.
TRIED_SECONDS = 1800.0
#: Time limit for an agent to receive what its predecessor persisted.
HAND_OVER_SECONDS = 60.0
END_SECONDS = 30.0
GAVE_UP = (
    f"The jupyter_sing daemon died again and again for {TRIED_SECONDS / 60:g} minutes: its "
    "agent.log may say why. Restart the kernel to get a new session."
)
_PR_SET_NAME = 15


class RestartPauses:
    """Series of agents that each died soon after their start. Pure.

    Parameters
    ----------
    now : float
        When the first agent began, in seconds of the monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._started_at = self._since = now
        self.deaths = 0  #: in this series

    def pause(self, now: float) -> float | None:
        """Return the seconds until the next agent is to be started; None: no other one is.

        Parameters
        ----------
        now : float
            When the last one died.
        """
        if not self.deaths or now - self._started_at >= LIVED_SECONDS:
            self._since, self.deaths = now, 0
        self.deaths += 1
        if now - self._since >= TRIED_SECONDS:
            return None
        vain = self.deaths - AT_ONCE_MAX
        seconds = min(PAUSE_MAX, PAUSE_MIN * 2.0 ** min(vain - 1, 16)) if vain > 0 else 0.0
        self._started_at = now + seconds
        return seconds


class Supervisor:
    """Holds what the next agent needs, and the connection to the present one.

    Parameters
    ----------
    agent : socket.socket
        Takes ownership.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._keep: Keep | None = None
        self._lock = self._listener = self._pidfd = -1
        self._persisted: dict[str, tuple[Deposit, list[int]]] = {}
        self._devices: dict[str, int] = {}
        self._series = RestartPauses(time.monotonic())
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Serve until an agent sends `Farewell`, or no agent stays alive."""
        while not self._receive():
            self._bury()
            if self._keep is None:
                return
            pause = self._series.pause(time.monotonic())
            if pause is None:
                self._give_up(self._keep)
                return
            count = len(self._persisted)
            log.warning("The agent died: the next one takes %d sessions, in %g s", count, pause)
            if pause:
                with restart_note.noted(Path(self._keep.socket), self._series.deaths, pause):
                    time.sleep(pause)  # there is no agent that could send anything meanwhile
            self._start(self._keep)
        # Closed before the connection: at its end the agent leaves, and the lock must be free then.
        close_all([*self._devices.values(), self._lock, self._listener])

    def _receive(self) -> bool:
        """Receive messages until the agent ends; return True if it sent `Farewell`."""
        try:
            while True:
                message, fds = recv_message(self._agent)
                if isinstance(message, Farewell):
                    return True
                self._take(message, fds)
        except (OSError, ProtocolError) as error:
            log.info("The connection to the agent ended: %s", error)
            return False

    def _take(self, message: Message, fds: list[int]) -> None:
        match message:
            case Keep():
                self._keep = message
                close_all([fd for fd in (self._lock, self._listener, self._pidfd) if fd >= 0])
                self._lock, self._listener, self._pidfd = fds
            case KeepDevice(node):
                close_all([self._devices[node]] if node in self._devices else [])
                (self._devices[node],) = fds
            case Deposit():
                self._drop(message.session)
                self._persisted[message.session] = (message, fds)
            case Withdraw(session):
                self._drop(session)
            case _:
                close_all(fds)
                raise ProtocolError(
                    f"The supervisor received an unexpected {type(message).__name__}."
                )

    def _drop(self, session: str) -> None:
        if session in self._persisted:
            close_all(self._persisted.pop(session)[1])

    def _bury(self) -> None:
        """Make sure that the agent has ended: without its connection it is of no use."""
        self._agent.close()
        if self._pidfd >= 0:
            end_processes([self._pidfd])
            os.close(self._pidfd)
            self._pidfd = -1
        if self._child is not None:
            self._child.wait()
            self._child = None

    def _start(self, keep: Keep) -> None:
        """Start the next agent and hand everything over to it.

        If resources are missing for that, the connection is closed: the agent counts as dead.
        """
        try:
            ours = os.pidfd_open(os.getpid())
        except OSError as error:
            log.warning("No agent could be started: %s", error.strerror)
            return
        try:
            self._agent, theirs = socket.socketpair()
            with theirs:
                self._child = subprocess.Popen(
                    [*keep.command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            self._pidfd = os.pidfd_open(self._child.pid)
            self._agent.settimeout(HAND_OVER_SECONDS)
            send_message(self._agent, keep, [self._lock, self._listener, ours])
            for node, fd in self._devices.items():
                send_message(self._agent, KeepDevice(node), [fd])
            for deposit, fds in self._persisted.values():
                send_message(self._agent, deposit, fds)
            send_message(self._agent, Done())
            self._agent.settimeout(None)
        except OSError as error:
            log.warning("The next agent did not take over: %s", error)
            self._agent.close()
            if self._child is not None:
                self._child.kill()
        finally:
            os.close(ours)

    def _give_up(self, keep: Keep) -> None:
        """Notify the clients that their sessions have ended; this process's exit frees the rest."""
        log.error("%s", GAVE_UP)
        with contextlib.suppress(OSError):
            os.unlink(keep.socket)
        for deposit, fds in self._persisted.values():
            for name, fd in zip(deposit.names, fds, strict=True):
                if name == "process":
                    end_processes([fd])
                elif name == "agent":
                    page = AgentPage(fd, writable=True)
                    page.reason, page.presence = GAVE_UP, Presence.ENDED
                    page.ring()


def end_processes(pidfds: Sequence[int], seconds: float = END_SECONDS) -> list[int]:
    """Kill processes, stopped ones too, and wait until they have ended.

    Returns
    -------
    list of int
        Those that have not ended within `seconds`: a driver may prevent it.
    """
    waiting = select.poll()
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        waiting.register(pidfd, select.POLLIN)
    left, deadline = set(pidfds), time.monotonic() + seconds
    while left:
        ended = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            break
        for pidfd, _ in ended:
            waiting.unregister(pidfd)
            left.discard(pidfd)
    return sorted(left)


def main(fd: int) -> None:
    """Run as the supervisor of the agent at the other end of a connection."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"sing-keeper", 0, 0, 0)
    os.set_inheritable(fd, False)
    Supervisor(socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
