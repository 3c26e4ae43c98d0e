"""REST API of device sessions, below ``jupyter-sing/api``; described by ``openapi.yaml``."""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

from jupyter_sing import lost_sessions, queries
from jupyter_sing.scheduler.policy.yaml_reader import TEXT_BYTES_MAX
from jupyter_sing.server import agent_requests, metrics
from jupyter_sing.server.notebooks import contents_path
from kernelproxy.common.errors import ControlError, Reason
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import (
    Checkpoint,
    CheckpointReply,
    CheckpointsReply,
    CheckpointsRequest,
    DeleteCheckpoint,
    Done,
    Message,
    MigrateRequest,
    Pin,
    PolicyApplied,
    Restore,
    RestoreReply,
    Resume,
    SessionReply,
    SetPolicy,
    SetPriority,
    StatusReply,
    StatusRequest,
    Suspend,
)
from kernelproxy.common.protocol.views import CheckpointOnServer, SessionView
from kernelproxy.common.readable import quoted
from kernelproxy.common.untrusted import parse_json

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
    _asking: asyncio.Future[Any] | None = None
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
        asked = asyncio.ensure_future(
            agent_requests.ask(reply_type, request, lambda: connect(start=start), timeout)
        )
        self._asking = asked
        try:
            return await asked
        except asyncio.CancelledError:
            if not self._left:
                raise
            raise ControlError("The request was cancelled.", "timeout") from None

    def on_connection_close(self) -> None:
        """Called by tornado when the client has disconnected: cancel its request."""
        self._left = True
        if self._asking is not None:
            self._asking.cancel()

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
        found = await self.told()
        gone = lost_sessions.lost(before, kernels.with_session(), found.sessions)
        sessions = [*found.sessions, *await lost_sessions.described(gone)]
        return StatusReply(found.devices, await self.named(sessions), found.sharing)

    async def told(self) -> StatusReply:
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
        try:
            body = self.get_json_body() or {}
        except UnicodeDecodeError:
            raise web.HTTPError(400, "The body must be UTF-8.") from None
        text = body.get(field, default) if isinstance(body, dict) else None
        if not isinstance(text, str) or (default is None and not text):
            raise web.HTTPError(400, f'The body must have a {field}: {{"{field}": "..."}}.')
        return text

    def reply_json(self, value: Any) -> None:
        """Answer with JSON."""
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


class StatusHandler(SingHandler):
    """``status``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List devices and sessions, with the figures of sharing."""
        found = asdict(await self.status_reply())
        del found["elsewhere"]  # only for the command line's `status`
        self.reply_json(found)


class ActivityHandler(SingHandler):
    """``activity``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Show which sessions used the devices, by default in the last day."""
        since = self._number("since", time.time() - queries.DAY_SECONDS)
        resolution = self._number("resolution", 1.0)
        found = await agent_requests.in_thread(lambda: queries.activity_since(since, resolution))
        self.reply_json(queries.with_names(found, (await self.status_reply()).sessions))

    def _number(self, name: str, default: float) -> float:
        """Return a number from the query."""
        text = self.get_query_argument(name, "")
        try:
            number = float(text) if text else default
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            raise web.HTTPError(400, f"{name} must be a number of seconds, not {text!r}.")
        return number


class DevicesHandler(SingHandler):
    """``devices``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the devices."""
        self.reply_json((await self.status_reply()).devices)


class SessionsHandler(SingHandler):
    """``sessions``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the sessions."""
        self.reply_json((await self.status_reply()).sessions)


class SessionHandler(SingHandler):
    """``sessions/{id}``."""

    @web.authenticated
    @authorized
    async def get(self, session_id: str) -> None:
        """Show one session."""
        for session in (await self.status_reply()).sessions:
            if session["id"] == session_id:
                self.reply_json(session)
                return
        raise ControlError(f"There is no session {session_id}.", "unknown-session")


class SessionVerbHandler(SingHandler):
    """``sessions/{id}/`` with ``suspend``, ``resume``, ``migrate``, ``pin``, ``unpin`` or
    ``priority`` behind it.
    """

    @web.authenticated
    @authorized
    async def post(self, session_id: str, verb: str) -> None:
        """Suspend, resume or move a session, or set a preference; answer when it is done."""
        request: Message = Resume(session_id)
        if verb == "suspend":
            request = Suspend(session_id, "Suspended in JupyterLab")
        elif verb == "migrate":
            request = MigrateRequest(session_id, self.body_text("device"))
        elif verb in ("pin", "unpin"):
            request = Pin(session_id, verb == "pin")
        elif verb == "priority":
            request = SetPriority(session_id, self.body_text("level"))
        reply = await self.call(SessionReply, request, VERB_SECONDS_MAX)
        (session,) = await self.named([reply.session])
        self.reply_json(session)


class SessionCheckpointHandler(SingHandler):
    """``sessions/{id}/checkpoint``."""

    @web.authenticated
    @authorized
    async def post(self, session_id: str) -> None:
        """Save the session's notebook; answer when it is safe on disk."""
        name = self.body_text("name", "")
        request = Checkpoint(session_id, name, form=self.body_text("form", ""))
        self.reply_json((await self.call_kernel(CheckpointReply, request)).checkpoint)


class SessionRestoreHandler(SingHandler):
    """``sessions/{id}/restore``."""

    @web.authenticated
    @authorized
    async def post(self, session_id: str) -> None:
        """Restore a notebook in place of the session's; answer when it is restored."""
        request = Restore(session_id, self.body_text("name"), self.body_text("form", ""))
        self.reply_json((await self.call_kernel(RestoreReply, request)).outcome)


class CheckpointsHandler(SingHandler):
    """``checkpoints``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """List the checkpoints, the newest first."""
        self.reply_json(await self.checkpoints())


class CheckpointHandler(SingHandler):
    """``checkpoints/{name}``."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Show one checkpoint."""
        for each in await self.checkpoints():
            if each["name"] == name:
                self.reply_json(each)
                return
        raise ControlError(f"There is no checkpoint {quoted(name)}.", "unknown-checkpoint")

    @web.authenticated
    @authorized
    async def delete(self, name: str) -> None:
        """Delete a checkpoint."""
        await self.call(Done, DeleteCheckpoint(name), start=True)
        self.set_status(204)
        self.finish()


class PolicyHandler(SingHandler):
    """``policy``."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Show the policy in force, or the one that the next daemon will apply."""
        self.reply_json({"policy": await agent_requests.in_thread(queries.standing_policy_text)})

    @web.authenticated
    @authorized
    async def put(self) -> None:
        """Apply another policy; with ``?dry_run=1`` only show which users it would affect."""
        dry = self.get_query_argument("dry_run", "0").lower() not in ("0", "false", "no", "")
        request = SetPolicy(self._policy(), dry)
        reply = await self.call(PolicyApplied, request, start=True)
        message = "Nothing was applied." if dry else "The policy is applied."
        self.reply_json({"message": message, **asdict(reply)})

    def _policy(self) -> str:
        """Return the policy of the body: a JSON field, or the body itself."""
        try:
            text = self.request.body.decode("utf-8")
        except UnicodeDecodeError:
            raise ControlError("policy: must be UTF-8", "bad-policy") from None
        with suppress(ValueError):
            body = parse_json(text)
            if isinstance(body, dict) and list(body) == ["policy"]:
                text = body["policy"] if isinstance(body["policy"], str) else json.dumps(body)
        if len(text) > TEXT_BYTES_MAX:
            most = TEXT_BYTES_MAX >> 10
            raise ControlError(f"policy: is too large; {most} KiB are allowed", "bad-policy")
        if not text.strip():
            raise web.HTTPError(400, 'The body must have a policy: {"policy": "..."}, or YAML.')
        return text


class MetricsHandler(SingHandler):
    """``metrics``, for Prometheus."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Show devices and sessions as metrics; only what the daemon reports."""
        found = await self.told()
        self.set_header("Content-Type", metrics.CONTENT_TYPE)
        self.finish(metrics.render(found.devices, found.sessions, found.sharing))


ROUTES: tuple[tuple[str, type[SingHandler]], ...] = (
    (r"status", StatusHandler),
    (r"activity", ActivityHandler),
    (r"devices", DevicesHandler),
    (r"sessions", SessionsHandler),
    (r"sessions/([0-9A-Za-z_-]+)", SessionHandler),
    (
        r"sessions/([0-9A-Za-z_-]+)/(suspend|resume|migrate|pin|unpin|priority)",
        SessionVerbHandler,
    ),
    (r"sessions/([0-9A-Za-z_-]+)/checkpoint", SessionCheckpointHandler),
    (r"sessions/([0-9A-Za-z_-]+)/restore", SessionRestoreHandler),
    (r"checkpoints", CheckpointsHandler),
    (r"checkpoints/([0-9A-Za-z._@+%-]+)", CheckpointHandler),  # browsers encode @ and +
    (r"policy", PolicyHandler),
    (r"metrics", MetricsHandler),
)


def handlers() -> list[tuple[str, type[SingHandler]]]:
    """Return the routes, below the server's base URL, which the extension application prepends."""
    return [(url_path_join("/jupyter-sing/api", path), handler) for path, handler in ROUTES]
