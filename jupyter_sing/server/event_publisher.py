"""Publisher of the daemon's changes on the server's event bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_sing.server import agent_requests
from jupyter_sing.server.notebooks import NotebookNames
from kernelproxy.common.errors import ControlError, ProtocolError
from kernelproxy.common.ipc.agent_client import connect_to_watch
from kernelproxy.common.ipc.channel import Channel, expect
from kernelproxy.common.protocol import Changed, Error, StatusReply, WatchRequest
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.provisioning import events

#: Between two checks whether a daemon runs.
POLL_SECONDS = 1.0


class Feed:
    """Emits an event for each change of a session, regardless of its cause.

    Neither starts a daemon nor keeps one running. Watches the daemon while one runs, and after it
    the next one.

    Parameters
    ----------
    emit : callable
        Called with the data of each event.
    names : NotebookNames
    log : logging.Logger
    """

    def __init__(
        self,
        emit: Callable[[dict[str, Any]], object],
        names: NotebookNames,
        log: logging.Logger,
    ) -> None:
        self._emit, self._names, self._log = emit, names, log
        #: Last event of each session that has not ended.
        self._published: dict[str, dict[str, Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def start(self) -> None:
        """Begin; idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="jupyter_sing feed")

    async def stop(self) -> None:
        """End; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            started = clock()
            try:
                await self._watch()
            except (ControlError, ProtocolError, OSError) as error:
                self._log.debug("jupyter_sing: the daemon is not watched: %s", error)
            except Exception:
                # Logged once until events can be published again: the next attempt is soon.
                if not self._failing:
                    self._log.exception("jupyter_sing: changes of sessions cannot be published")
                self._failing = True
            # At once, if the connection lasted for a while: the next daemon may run already.
            await asyncio.sleep(max(0.0, started + POLL_SECONDS - clock()))

    async def _watch(self) -> None:
        """Emit changes until the connection ends; return at once if no daemon runs.

        Raises
        ------
        ControlError
            If it cannot be reached now, or refuses.
        OSError, ProtocolError
            At the connection's end.
        """
        sock = await agent_requests.in_thread(connect_to_watch)
        if sock is None:
            self._end(list(self._published))
            return
        with contextlib.closing(Channel(sock)) as channel:
            await channel.send(WatchRequest())
            while True:
                message = expect(await channel.receive())
                match message:
                    case StatusReply(_, sessions):
                        there = {each["id"] for each in sessions}
                        self._end([each for each in self._published if each not in there])
                        await self._publish(sessions)
                    case Changed(sessions, _, gone):
                        self._end(gone)
                        await self._publish(sessions)
                    case Error(text, reason):
                        raise ControlError(text, reason)

    async def _publish(self, sessions: Sequence[SessionView]) -> None:
        if sessions:
            for session in await self._names.name(sessions):
                event = events.changed(session)
                self._published[session["id"]] = event
                self._emit(event)
            self._failing = False

    def _end(self, sessions: Sequence[str]) -> None:
        for each in sessions:
            if event := self._published.pop(each, None):
                self._emit({**event, "ended": True})
