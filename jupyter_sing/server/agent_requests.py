"""Requests to the daemon from the server's event loop, without a thread that waits for replies.

Requests may take minutes, until a cell ends or there is room; the server's own threads serve
everything else. So only connecting uses a thread, from a small pool of its own.
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
    """Run a short blocking function in a thread of the pool for requests."""
    return await asyncio.get_running_loop().run_in_executor(_pool, work)


async def ask(
    reply_type: type[Reply], request: Message, connect: Callable[[], Control], timeout: float
) -> Reply:
    """Send a request and wait for its reply; cancelling this disconnects.

    If the daemon dies during a request, the request is sent once more, to the next daemon.

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
    """Close a connection whose caller was cancelled."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
