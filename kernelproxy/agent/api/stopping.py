"""Stopping the daemon on a user's request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from kernelproxy.agent.api.agent import Agent
from kernelproxy.agent.api.peer_limits import check_master
from kernelproxy.agent.checkpoint.progress import PROGRESS_SECONDS
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.channel import Channel
from kernelproxy.common.protocol import Progress, Stop, StopReply
from kernelproxy.kernel_host import client

log = logging.getLogger(__name__)


class Stopping:
    """Carries out `Stop`, and replies when everything has ended.

    Parameters
    ----------
    agent : Agent
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._stoppers: list[tuple[Channel, StopReply]] = []

    async def stop(self, channel: Channel, request: Stop, uid: int) -> None:
        """Begin to stop; the connection stays open for the reply, which `announce_end` sends."""
        check_master(uid, system=self._agent.settings.system)
        reply = StopReply([], [])
        if request.checkpoint and not self._agent.stopping.is_set():
            reply = await self._save_sessions(channel)
        if not self._agent.settings.system:  # there, each user has a kernel host of their own
            await self._end_kernels()
        self._stoppers.append((channel, reply))
        self._agent.stopping.set()
        await asyncio.get_running_loop().create_future()  # until it is cancelled

    async def _end_kernels(self) -> None:
        """End the kernels that have outlived their Jupyter server: none would connect to them."""
        try:
            await asyncio.to_thread(client.end_kernels)
        except (ControlError, OSError) as error:
            log.warning("Kernels without a server were not ended: %s", error)

    async def _save_sessions(self, channel: Channel) -> StopReply:
        """Make checkpoints of all notebooks that would lose something.

        Ends early if another caller stops the daemon.

        Raises
        ------
        OSError
            If the caller has disconnected.
        """
        seconds, turn = self._agent.settings.stop_seconds, asyncio.Lock()
        making = {
            asyncio.create_task(each.automatic.before_end(seconds, turn))
            for each in self._agent.sessions.values()
        }
        others = asyncio.create_task(self._agent.stopping.wait())
        try:
            waiting: set[asyncio.Task[Any]] = set(making)
            while waiting and not others.done():
                done, _ = await asyncio.wait(
                    {*waiting, others},
                    timeout=PROGRESS_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting -= done
                await channel.send(Progress(len(making) - len(waiting), len(making)))
        finally:
            for task in (*making, others):
                task.cancel()
            ended = await asyncio.gather(*making, return_exceptions=True)
        found = [each for each in ended if not isinstance(each, BaseException)]
        return StopReply([n for n, _ in found if n], [why for _, why in found if why])

    async def announce_end(self) -> None:
        """Reply to the callers of `Stop` that everything has ended."""
        for channel, reply in self._stoppers:
            with contextlib.suppress(OSError):
                await channel.send(reply)
