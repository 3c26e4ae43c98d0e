"""Process manager: saves, restores and replaces a kernel's process on the agent's commands.

The agent makes all decisions; they arrive in the thread of `agent_link`. Only the process manager
touches the process and its ZMQ proxy. If the agent dies, it lets requests through until the next
one is connected. A command in progress is completed first, and so is a committed replacement: the
next agent finds either the state before or the state after.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kernelproxy.common import protocol
from kernelproxy.common.errors import ProcessError
from kernelproxy.common.protocol import Message
from kernelproxy.criu import criu, images, sandbox
from kernelproxy.kernel_host.agent_link import AgentLink
from kernelproxy.kernel_host.process_handle import Body, end
from kernelproxy.kernel_host.sandbox_resources import SandboxResources
from kernelproxy.zmq_proxy import connection
from kernelproxy.zmq_proxy.connection import Connection
from kernelproxy.zmq_proxy.proxy import ZmqProxy

if TYPE_CHECKING:
    from kernelproxy.criu.sandbox import Form

#: Time for a loaded machine to start a process in a new sandbox.
START_SECONDS_MAX = 30.0
#: Time for a restored process to join its session, and reply.
READY_SECONDS_MAX = 60.0
#: Time for a process to reply to the requests that it executes before it is replaced. It begins
#: nothing after that, so giving up would leave a useless kernel: longer than cells take that ask to
#: be replaced.
FINISH_SECONDS_MAX = 86_340.0

logger = logging.getLogger(__name__)


@dataclass
class _Candidate:
    """Process beside the kernel's, which is to replace it."""

    running: criu.RestoredProcess
    connection: Connection
    session: str
    committed: bool = False  # the kernel executes nothing more, or soon will not


class ProcessManager:
    """Process manager of one kernel, from its start to its end.

    Parameters
    ----------
    form : Form
        Method by which its process can be saved.
    session : str
        Id of its session; changes when the kernel is replaced.
    info : mapping
        Connection information of the kernel manager, which clients use.
    name : str
        Name of the connection file.
    path : str or Path, optional
        Socket of the agent; default: the one that the environment names.

    Raises
    ------
    ProcessError
        If the kernel cannot be managed, see `connection.official`.
    """

    def __init__(
        self,
        form: Form,
        session: str,
        info: Mapping[str, Any],
        name: str,
        path: str | Path | None = None,
    ) -> None:
        self.form, self.session = form, session
        self._official = connection.official(info)
        self._private = connection.private(self._official)
        self._link = AgentLink(path, self)
        self._resources = SandboxResources(info, name)
        self._body: Body | None = None
        self._candidate: _Candidate | None = None
        try:
            self.connection_file = self._resources.write("first", self._private)
            self._proxy = ZmqProxy(self._official, self._link.request_process, self._shut_down)
        except BaseException:
            self._resources.free()
            raise

    def start(
        self,
        command: list[str],
        launch: Callable[[list[str], list[int]], subprocess.Popen[bytes]],
        outlets: Sequence[IO[bytes] | int | None] = (None, None),
    ) -> subprocess.Popen[bytes]:
        """Start the kernel in a sandbox. If that fails, nothing remains, and this is closed.

        Parameters
        ----------
        command : list of str
            Command that starts the kernel, with `connection_file`.
        launch : callable
            Function that starts a command, which inherits descriptors.
        outlets : sequence, optional
            Standard output and error, as for `subprocess.Popen`; restored processes get the same.

        Raises
        ------
        ProcessError, OSError
            If it does not start.
        """
        reader, writer = os.pipe()
        process = None
        try:
            lifeline = self._resources.lifeline
            self._resources.keep(outlets)
            prefix = sandbox.prefix(self.form, writer, lifeline)
            process = launch([*prefix, *command], [writer, lifeline])
            os.close(writer)
            writer = -1
            self._body = Body(process, sandbox.read_pid(reader, START_SECONDS_MAX))
            self._proxy.connect(self._private)
        except BaseException:
            if process is not None:
                end(process)
            self.close()
            raise
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        self._link.start()
        return process

    # Interface for the provisioner.

    @property
    def body(self) -> Body:
        """Process of the kernel."""
        assert self._body is not None, "it was not started"
        return self._body

    @property
    def pid(self) -> int:
        """Process id of the kernel; 0 while there is none."""
        return self.body.pid

    def signal(self, number: int) -> None:
        """Send a signal to the kernel and the processes that it has started."""
        self.body.signal(number)

    def poll(self) -> int | None:
        """Return the kernel's exit status; None if it has not ended."""
        if not self._proxy.alive and not self._link.closed:
            return 1  # its ZMQ proxy has died by our bug; a restart helps
        return self.body.poll()

    def shut_down(self) -> None:
        """Report that the kernel was asked to end. One that hibernates ends without a restore."""
        if self.body.pid == 0:
            self.body.kill(0)

    def close(self) -> None:
        """End the kernel, and free all its resources. Idempotent."""
        self._link.disconnect()
        if self._body is not None:
            self._body.kill()
        self._proxy.close()
        self._link.join()
        self._drop_candidate()
        if self._body is not None:
            self._body.reap()
        self._resources.free()

    def _shut_down(self) -> None:
        """Handle that a client has ended the kernel while it had no process.

        Called by the ZMQ proxy, in its thread.
        """
        self.body.kill(0)

    # Called by the link, in its thread, as all that follows.

    def unattended(self) -> None:
        """Let the kernel continue without the agent, which may have died at any point."""
        if self._candidate is not None and self._candidate.committed:
            with contextlib.suppress(ProcessError):  # then it is not replaced
                self._replace()
        self._drop_candidate()
        if not self._link.closed and self.body.pid:
            with contextlib.suppress(ProcessError):
                self._proxy.let_through()

    def abandoned(self, why: str) -> None:
        """Handle that no agent knows the session: a hibernating kernel cannot be restored."""
        self.unattended()
        if not self.body.pid:
            logger.warning("jupyter_sing: the hibernating kernel is lost: %s", why)
            self.body.kill(1)

    def carry_out(self, order: Message) -> Message:
        """Carry out a command of the agent."""
        match order:
            case protocol.HoldRequests(seconds=seconds):
                self._proxy.hold(seconds)
                return protocol.Done()
            case protocol.LetThrough():
                self._let_through()
                return protocol.Done()
            case protocol.Dump():
                return protocol.Dumped(self._dump(order))
            case protocol.Revive():
                return protocol.Revived(self._revive(order))
            case protocol.CommitReplace():
                self._revived_beside().committed = True
                return protocol.Done()
            case protocol.Replace():
                self._replace()
                return protocol.Done()
            case _:
                return protocol.Error(f"{order.wire_kind} is no order.", "bad-request")

    def _dump(self, order: protocol.Dump) -> float:
        """Save the process, and let it continue or not."""
        body, pid, directory = self.body, self.body.pid, Path(order.directory)
        if not pid:
            raise ProcessError("the kernel has no process", "dump")
        self._proxy.freeze(True)
        if not order.leave_running:
            body.leave()
        continues = True
        try:
            seconds = criu.dump(
                self.form, pid, directory,
                wake_fd=order.wake_fd, leave_running=order.leave_running,
            )  # fmt: skip
            continues = order.leave_running
            if continues:
                self._private.save(directory)
        except OSError as error:
            raise ProcessError(f"its images are not whole: {error}", "dump") from error
        finally:
            if continues:
                body.stay()
                with contextlib.suppress(ProcessError):  # the process or the kernel has ended
                    self._proxy.freeze(False)
                    criu.wake(pid, order.wake_fd, {"restored": False, "session": self.session})
        if not continues:
            body.gone()
            self._link.withdraw_request()
            self._proxy.freeze(False)
            self._proxy.detach()
        return seconds

    def _revive(self, order: protocol.Revive) -> int:
        """Restore a process from images, in place of the saved one, or beside the current one."""
        directory, beside = Path(order.directory), order.beside
        if beside and not self.body.pid:
            raise ProcessError("the kernel has no process to be replaced", "restore")
        if self.body.pid and not beside:
            return self.body.pid  # restored already, for an agent that died before the reply
        try:
            if beside:
                self._proxy.pause()
            images.check(directory)
            before = connection.saved(directory) if beside else self._private
            return self._restore(order, before, connection.renumber(criu.listening(directory)))
        except (ProcessError, OSError) as error:
            if beside:
                self._proxy.let_through()
            else:
                self._proxy.listen()
            if isinstance(error, OSError):
                raise ProcessError(f"the process cannot be restored: {error}", "restore") from error
            raise

    def _restore(self, order: protocol.Revive, before: Connection, ports: Mapping[int, int]) -> int:
        """Start a process from images and wait until it replies; if it does not, end it."""
        directory, beside = Path(order.directory), order.beside
        after = self._official.at(before.ip, {c: ports.get(p, p) for c, p in before.ports.items()})
        line: dict[str, Any] = {"restored": True, "session": order.session}
        if ports:
            line["ports"] = {str(old): new for old, new in ports.items()}
        if beside:
            line["connection_file"] = self._resources.write(order.session, after)
        stdout, stderr = self._resources.outlets
        running = criu.restore(
            self.form, directory, ports=ports,
            lifeline_fd=self._resources.lifeline, stdout=stdout, stderr=stderr,
        )  # fmt: skip
        try:
            criu.wake(running.pid, images.Info.read(directory).wake_fd, line)
            self._proxy.prepare(after, READY_SECONDS_MAX, beside)
            if not beside:
                self._proxy.adopt()
        except BaseException:
            end(running.process)
            raise
        if beside:
            self._candidate = _Candidate(running, after, order.session)
        else:
            self._link.withdraw_request()
            self._private = after
            if not self.body.become(running.process, running.pid):
                raise ProcessError("the kernel has ended", "restore")
        return running.pid

    def _let_through(self) -> None:
        """Let requests through to the current process; discard a candidate."""
        self._drop_candidate()
        self._proxy.let_through()

    def _replace(self) -> None:
        """Replace the kernel's process by the candidate."""
        candidate = self._revived_beside()
        try:
            self._proxy.replace(FINISH_SECONDS_MAX)
        except ProcessError:
            self._let_through()
            raise
        self._candidate = None
        self._private, self.session = candidate.connection, candidate.session
        self.body.become(candidate.running.process, candidate.running.pid)

    def _revived_beside(self) -> _Candidate:
        if self._candidate is None:
            raise ProcessError("there is no process to take the kernel's place", "restore")
        return self._candidate

    def _drop_candidate(self) -> None:
        """End the process that was to replace the kernel's."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            with contextlib.suppress(ProcessError):
                self._proxy.discard()
            end(candidate.running.process)
