"""The process manager of a session's kernel, as the agent knows it: sends it one command at a time.

The process manager lives in the server that started the kernel (`kernelproxy.criu`). While it is
not connected, the process can neither be saved nor restored.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, TypeVar

from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import Done, Error, Knock, Message

if TYPE_CHECKING:
    from kernelproxy.agent.session.session import Session

log = logging.getLogger(__name__)

Reply = TypeVar("Reply", bound=Message)
NOT_SHARED = (
    "The daemon of the whole machine saves no processes, but variables, files and the device's "
    "state."
)
GONE = "the server that runs the kernel is not connected"


class Tender:
    """One connection of a process manager, until it ends.

    Parameters
    ----------
    session : Session
        The session of its kernel; changes when a restored process takes the kernel's place.
    channel : Channel
    """

    def __init__(self, session: Session, channel: Channel) -> None:
        self.session = session
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
            self.session.hibernation.tended(self)
            while True:
                message = expect(await self._channel.receive())
                if isinstance(message, Knock):
                    self.session.hibernation.knock()
                elif self._awaited is not None and not self._awaited.done():
                    self._awaited.set_result(message)
                else:
                    log.warning("Session %s: its tender answered nothing", self.session.id)
                    return
        except (OSError, ProtocolError) as error:
            log.info("Session %s: its tender has left: %s", self.session.id, error)
        finally:
            self.close()
            if self.session.tender is self:
                self.session.tender = None

    def close(self) -> None:
        """Close the connection, and fail the command that waits for a reply."""
        self._channel.close()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(ConnectionError("The tender has left."))


async def tend(session: Session, channel: Channel) -> None:
    """Serve a process manager that asks to be a session's, until it disconnects.

    Raises
    ------
    ControlError
        If it is not allowed to, or the session has ended.
    """
    _, uid = channel.peer()
    if session.shared:
        raise ControlError(NOT_SHARED, "unavailable")
    if not uid == os.getuid() == session.owner:
        raise ControlError("Only the user who started a kernel manages its process.", "not-allowed")
    session.check_usable()
    if session.tender is not None:
        session.tender.close()
    session.tender = Tender(session, channel)
    await session.tender.serve()
