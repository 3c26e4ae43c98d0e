"""Requests to the daemon from the server's event loop, which waits in no thread for an answer.

Verbs may wait for minutes, for a cell to end or for room; the server's own threads serve everything
else. So only connecting is done in a thread, one of a few that are for this alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc.agent_client import Control
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import Error, Message, Progress

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")
THREADS = 8

_pool = ThreadPoolExecutor(THREADS, "sing-ask")


async def in_thread(work: Callable[[], T]) -> T:
    """Do something short that blocks, in a thread that others than we do not need."""
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


async def ask(
    reply_type: type[Reply], request: Message, connect: Callable[[], Control], timeout: float
) -> Reply:
    """Send a request and wait for its reply; cancelling this hangs up.

    A request during which the daemon dies is made once more, to the daemon that takes its place.

    Parameters
    ----------
    reply_type : type
    request : Message
    connect : callable
        Connects to the daemon; called in a thread.
    timeout : float
        Seconds to wait for each message.

    Raises
    ------
    ControlError
        As `Control.expect`.
    """
    try:
        reply = await _exchange(request, connect, timeout)
    except (OSError, ProtocolError):
        try:
            reply = await _exchange(request, connect, timeout)
        except (OSError, ProtocolError) as error:
            raise ControlError(
                f"The connection to the jupyter_sing daemon broke ({error}).", "no-daemon"
            ) from error
    if isinstance(reply, Error):
        raise ControlError(reply.message, reply.reason)
    if not isinstance(reply, reply_type):
        raise ControlError("The jupyter_sing daemon gave an unexpected answer.", "failed")
    return reply


async def _exchange(request: Message, connect: Callable[[], Control], timeout: float) -> Message:
    connecting = _pool.submit(connect)
    try:
        control = await asyncio.wrap_future(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close)
        raise
    with contextlib.closing(Channel(control.detach())) as channel:
        try:
            async with asyncio.timeout(timeout):
                await channel.send(request)
            while True:
                async with asyncio.timeout(timeout):
                    reply = expect(await channel.receive())
                if not isinstance(reply, Progress):
                    return reply
        except TimeoutError as error:
            raise ControlError(
                f"The jupyter_sing daemon did not answer within {timeout:g} seconds.", "timeout"
            ) from error


def _close(connecting: Future[Control]) -> None:
    """Close a connection that nobody waited for."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
