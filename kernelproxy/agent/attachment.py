"""The kernel of a session, as the agent knows it: a process and its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelproxy.agent.channel import Channel, expect
from kernelproxy.agent.processes import ProcessWatch
from kernelproxy.agent.zygotes import Zygotes
from kernelproxy.errors import ControlError, ProtocolError, WorkerError
from kernelproxy.oplog import close_all
from kernelproxy.protocol import Attached, Bell, Message

if TYPE_CHECKING:
    from kernelproxy.agent.session import Session


class Attachment:
    """Closes the session when its kernel ends, and lets it look when the kernel rings.

    Parameters
    ----------
    session : Session
    zygotes : Zygotes
    """

    def __init__(self, session: Session, zygotes: Zygotes) -> None:
        self.pid: int | None = None
        self.torch_version: str | None = None
        self._session, self._zygotes = session, zygotes
        self._connected = False
        self._channel: Channel | None = None
        self._watch: ProcessWatch | None = None

    def watch_opener(self, pid: int) -> None:
        """Close the session if the process that opened it ends before a kernel has attached."""
        self._watch_process(pid)

    def _watch_process(self, pid: int, pidfd: int | None = None) -> None:
        self.unwatch()
        why = "Its kernel never started." if self.pid is None else "Its kernel ended."
        self._watch = ProcessWatch(pid, lambda: self._session.close(why), pidfd)

    def unwatch(self) -> None:
        """Let the process end unnoticed; doing it twice is no error."""
        if self._watch is not None:
            self._watch.close()

    async def serve(self, channel: Channel, torch_version: str) -> None:
        """Attach a kernel and hear its bells until it is gone; then the session is closed.

        A kernel whose daemon died attaches again.

        Raises
        ------
        ControlError
            If the session has another kernel already, or no worker could run for this one.
        """
        session, (pid, _) = self._session, channel.peer()
        if self._connected or session.closing or self.pid not in (None, pid):
            raise ControlError(
                f"Session {session.id} belongs to another process already.", "already-attached"
            )
        self._connected = True
        if self.pid is None:
            await self._attach(pid, torch_version)
        self._channel = channel
        fds = session.device_state.memory.kernel_fds()
        try:
            await channel.send(Attached(session.id), fds)
        finally:
            close_all(fds)
        session.look()
        try:
            while isinstance(expect(await channel.receive()), Bell):
                session.look()
            why = "Its kernel sent something else than bells."
        except ConnectionError:
            why = "Its kernel ended."
        except (OSError, ProtocolError) as error:
            why = f"Its kernel's connection broke: {error}"
        session.close(why)

    def check_is(self, pid: int) -> None:
        """Raise ControlError if a process is not the kernel; before it attached, any may be."""
        if self.pid not in (None, pid):
            raise ControlError("Only the kernel itself can do that.", "not-allowed")

    async def send(self, message: Message) -> None:
        """Tell the kernel something.

        Raises
        ------
        ControlError
            If it is not connected.
        """
        try:
            if self._channel is None:
                raise ConnectionError("it has not used the device yet")
            await self._channel.send(message)
        except OSError as error:
            raise ControlError(f"Its kernel cannot be reached: {error}.", "unavailable") from error

    async def _attach(self, pid: int, torch_version: str) -> None:
        """Take a process for the kernel; raises as `serve`."""
        session, self.pid = self._session, pid
        try:
            # Better said now, while the kernel can still run without us, than at its first cell.
            await self._zygotes.get(session.python, torch_version)
        except WorkerError as error:
            self.pid, self._connected = None, False
            raise ControlError(str(error), "unavailable") from error
        if session.closing:
            raise ControlError(f"Session {session.id} was closed.", "ended")
        self.torch_version = torch_version
        self._watch_process(pid)  # its socket may live on in children that it forked
        session.deposit()

    def record(self) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """What `adopt` needs: a record in JSON, and named descriptors, which stay ours."""
        pidfd = self._watch.pidfd if self._watch is not None else None
        record = {"pid": self.pid, "torch_version": self.torch_version}
        return record, [] if pidfd is None else [("watched", pidfd)]

    def adopt(self, record: dict[str, Any], pidfd: int | None) -> None:
        """Go on where the agent was that died; the kernel will attach again."""
        self.pid, self.torch_version = record["pid"], record["torch_version"]
        if pidfd is not None:
            self._watch_process(self.pid or 0, pidfd)
        elif self.pid != 0:  # it ended when the agent did; one of another namespace has no number
            self._session.close("Its kernel ended.")
