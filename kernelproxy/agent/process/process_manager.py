"""The process manager of a session's kernel, as the agent knows it: sends it one command at a time.

The process manager lives in the server that started the kernel (`kernelproxy.criu`). While it is
not connected, the process can neither be saved nor restored.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Protocol, TypeVar

from kernelproxy.agent.session.core import SessionCore
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import Done, Error, Knock, Message

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)
NOT_SHARED = (
    "The daemon of the whole machine saves no processes, but variables, files and the device's "
    "state."
)
GONE = "the server that runs the kernel is not connected"


class ManagerListener(Protocol):
    """Receiver of the events of a process manager."""

    def manager_connected(self, manager: ProcessManagerConnection) -> None:
        """It has connected; no command to an earlier one is under way."""

    def request_process(self) -> None:
        """A request waits for the kernel."""


class ProcessManagerConnection:
    """One connection of a process manager, until it ends.

    Parameters
    ----------
    slot : ProcessManagerSlot
        Of its kernel's session; changes when a restored process takes the kernel's place.
    channel : Channel
    """

    def __init__(self, slot: ProcessManagerSlot, channel: Channel) -> None:
        self.slot = slot
        self.pid, _ = channel.peer()
        self._channel = channel
        self._ordering = asyncio.Lock()
        self._awaited: asyncio.Future[Message] | None = None

    async def order(self, order: Message, reply_type: type[Reply], seconds: float) -> Reply:
        """Send a command and wait until it is carried out; first wait for one that is running.

        Raises
        ------
        ControlError
            If it was not carried out; ``unavailable`` if the connection ended, ``timeout`` if it
            takes too long: then the connection is closed, because the outcome is not known.
        """
        async with self._ordering:
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    await self._channel.send(order)
                    reply = await self._awaited
            except TimeoutError as error:
                self._channel.close()
                what = order.wire_kind
                raise ControlError(f"{what} took longer than {seconds:g} s.", "timeout") from error
            except OSError as error:
                raise ControlError(f"Meanwhile, {GONE}.", "unavailable") from error
            except asyncio.CancelledError:
                self._channel.close()
                raise
            finally:
                self._awaited = None
        if isinstance(reply, reply_type):
            return reply
        if isinstance(reply, Error):
            raise ControlError(reply.message, reply.reason)
        self._channel.close()
        raise ControlError(f"{order.wire_kind} was answered with something else.", "failed")

    async def serve(self) -> None:
        """Confirm that it is the session's process manager, and serve it until it disconnects."""
        try:
            await self._channel.send(Done())
            self.slot.listener.manager_connected(self)
            while True:
                message = expect(await self._channel.receive())
                if isinstance(message, Knock):
                    self.slot.listener.request_process()
                elif self._awaited is not None and not self._awaited.done():
                    self._awaited.set_result(message)
                else:
                    log.warning("Session %s: its process manager answered nothing", self.slot.id)
                    return
        except (OSError, ProtocolError) as error:
            log.info("Session %s: its process manager has left: %s", self.slot.id, error)
        finally:
            self.close()
            if self.slot.current is self:
                self.slot.current = None

    def close(self) -> None:
        """Close the connection, and fail the command that waits for a reply."""
        self._channel.close()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(ConnectionError("The process manager has left."))


class ProcessManagerSlot:
    """The place of one session for its kernel's process manager.

    Parameters
    ----------
    core : SessionCore
    """

    #: Set before a process manager connects.
    listener: ManagerListener

    def __init__(self, core: SessionCore) -> None:
        self.id = core.id
        #: None while none is connected.
        self.current: ProcessManagerConnection | None = None
        self._core = core

    async def serve(self, channel: Channel) -> None:
        """Serve a process manager that asks to be the session's, until it disconnects.

        Raises
        ------
        ControlError
            If it is not allowed to, or the session has ended.
        """
        _, uid = channel.peer()
        if self._core.shared:
            raise ControlError(NOT_SHARED, "unavailable")
        if not uid == os.getuid() == self._core.owner:
            raise ControlError(
                "Only the user who started a kernel manages its process.", "not-allowed"
            )
        self._core.check_usable()
        if self.current is not None:
            self.current.close()
        self.current = ProcessManagerConnection(self, channel)
        await self.current.serve()

    def hand_over(self, manager: ProcessManagerConnection, to: ProcessManagerSlot) -> None:
        """Give the process manager to another session, whose process takes the kernel's place."""
        self.current, to.current, manager.slot = None, manager, to

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.current is not None:
            self.current.close()
