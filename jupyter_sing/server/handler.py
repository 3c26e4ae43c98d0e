"""Base of the REST handlers: authorisation, requests to the daemon, errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, TypeVar

from jupyter_server.base.handlers import APIHandler
from tornado import web

from jupyter_sing import lost_sessions
from jupyter_sing.server import agent_requests
from jupyter_sing.server.notebooks import contents_path
from kernelproxy.common.errors import ControlError, Reason
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import (
    CheckpointsReply,
    CheckpointsRequest,
    Message,
    StatusReply,
    StatusRequest,
)
from kernelproxy.common.protocol.views import CheckpointOnServer, SessionView

AUTH_RESOURCE = "jupyter_sing"
ANSWER_SECONDS_MAX = 30.0
# A resume may wait for room; a suspend for the operator in progress.
VERB_SECONDS_MAX = 600.0
# A kernel that has just started may not accept requests yet; its clients need not know when.
CONNECT_SECONDS_MAX = 20.0
CONNECT_PAUSE_SECONDS = 0.2

# Status codes by the reason of a refusal; others are 500.
_STATUS_CODES: dict[Reason, int] = {
    "unknown-session": 404,
    "unknown-device": 404,
    "unknown-checkpoint": 404,
    "name": 400,
    "busy": 409,
    "quota": 507,
    "full": 507,
    "ambiguous": 409,
    "ended": 409,
    "already-attached": 409,
    "no-room": 409,
    "not-allowed": 403,
    "bad-request": 400,
    "bad-policy": 400,
    "no-daemon": 503,
    "unavailable": 503,
    "stopping": 503,
    "timeout": 504,
}

Reply = TypeVar("Reply", bound=Message)


class SingHandler(APIHandler):
    """Base: authorisation as one resource, errors as ``{"message", "reason"}``."""

    auth_resource = AUTH_RESOURCE
    _pending_call: asyncio.Future[Any] | None = None
    _left = False

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Called by tornado when a handler raised."""
        error = kwargs.get("exc_info", (None, None, None))[1]
        message, reason = "Something unexpected failed; see the server's log.", "failed"
        if isinstance(error, ControlError):
            message, reason = error.message, error.reason
            self.set_status(_STATUS_CODES.get(reason, 500))
        elif isinstance(error, web.HTTPError):
            reason = "bad-request" if status_code == 400 else "not-allowed"
            message = error.log_message or error.reason or self._reason
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"message": message, "reason": reason}))

    def log_exception(self, *exc_info: Any) -> None:
        """Called by tornado before `write_error`; a refused request is no fault of the server."""
        if isinstance(exc_info[1], ControlError):
            self.log.info(
                "jupyter_sing: %s %s: %s", self.request.method, self.request.path, exc_info[1]
            )
            return
        super().log_exception(*exc_info)

    async def call(
        self,
        reply_type: type[Reply],
        request: Message,
        timeout: float = ANSWER_SECONDS_MAX,
        *,
        start: bool = False,
    ) -> Reply:
        """Send a request to the daemon; there is no limit on concurrent requests.

        Without a daemon there are no sessions, but checkpoints are on disk: `start` it for these.
        """
        pending = asyncio.ensure_future(
            agent_requests.ask(reply_type, request, lambda: connect(start=start), timeout)
        )
        self._pending_call = pending
        try:
            return await pending
        except asyncio.CancelledError:
            if not self._left:
                raise
            raise ControlError("The request was cancelled.", "timeout") from None

    def on_connection_close(self) -> None:
        """Called by tornado when the client has disconnected: cancel its request."""
        self._left = True
        if self._pending_call is not None:
            self._pending_call.cancel()

    async def call_kernel(self, reply_type: type[Reply], request: Message) -> Reply:
        """As `call`, for requests to a kernel; wait a short time for one that is starting."""
        end = time.monotonic() + CONNECT_SECONDS_MAX
        while True:
            try:
                return await self.call(reply_type, request, VERB_SECONDS_MAX)
            except ControlError as error:
                if error.reason != "unavailable" or time.monotonic() > end:
                    raise
            await asyncio.sleep(CONNECT_PAUSE_SECONDS)

    async def status_reply(self) -> StatusReply:
        """Return all devices and sessions, the sessions named after their notebooks. Includes
        kernels of this server whose session has ended.
        """
        kernels: lost_sessions.Kernels = self.settings["jupyter_sing_kernels"]
        before = kernels.with_session()
        found = await self.agent_status()
        gone = lost_sessions.lost(before, kernels.with_session(), found.sessions)
        sessions = [*found.sessions, *await lost_sessions.described(gone)]
        return StatusReply(found.devices, await self.named(sessions), found.sharing)

    async def agent_status(self) -> StatusReply:
        """Return the daemon's devices and sessions; none if no daemon runs."""
        try:
            return await self.call(StatusReply, StatusRequest())
        except ControlError as error:
            if error.reason != "no-daemon":
                raise
            return StatusReply([], [])

    async def named(self, sessions: list[SessionView]) -> list[SessionView]:
        """Name sessions after their notebooks."""
        names: list[SessionView] = await self.settings["jupyter_sing_notebooks"].name(sessions)
        return names

    async def checkpoints(self) -> list[CheckpointOnServer]:
        """Return all checkpoints, newest first, with their notebooks' paths on this server."""
        found = (await self.call(CheckpointsReply, CheckpointsRequest(), start=True)).checkpoints
        root = str(getattr(self.contents_manager, "root_dir", ""))
        return [{**each, "path": contents_path(each.get("notebook", ""), root)} for each in found]

    def body_text(self, field: str, default: str | None = None) -> str:
        """Return a field of the body; without a default the field is required."""
        text = self._body_field(field, default)
        if not isinstance(text, str) or (default is None and not text):
            raise web.HTTPError(400, f'The body must have a {field}: {{"{field}": "..."}}.')
        return text

    def body_switch(self, field: str) -> bool:
        """Return a field of the body that is true or false."""
        on = self._body_field(field, None)
        if not isinstance(on, bool):
            raise web.HTTPError(400, f'The body must say {{"{field}": true}}, or false.')
        return on

    def _body_field(self, field: str, default: object) -> object:
        try:
            body = self.get_json_body() or {}
        except UnicodeDecodeError:
            raise web.HTTPError(400, "The body must be UTF-8.") from None
        return body.get(field, default) if isinstance(body, dict) else None

    def reply_json(self, value: Any) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))
