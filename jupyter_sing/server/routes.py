"""REST API of device sessions, below ``jupyter-sing/api``; described by ``openapi.yaml``."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict

from jupyter_server.auth.decorator import authorized
from jupyter_server.utils import url_path_join
from tornado import web

from jupyter_sing import queries
from jupyter_sing.scheduler.policy.yaml_reader import TEXT_BYTES_MAX
from jupyter_sing.server import agent_requests, metrics
from jupyter_sing.server.handler import VERB_SECONDS_MAX, SingHandler
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    Checkpoint,
    CheckpointReply,
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
    SetDeterministic,
    SetPolicy,
    SetPriority,
    Suspend,
)
from kernelproxy.common.readable import quoted
from kernelproxy.common.untrusted import parse_json


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
    """``sessions/{id}/`` with ``suspend``, ``resume``, ``migrate``, ``pin``, ``unpin``,
    ``priority`` or ``deterministic`` behind it.
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
        elif verb == "deterministic":
            request = SetDeterministic(session_id, self.body_switch("on"))
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
        found = await self.agent_status()
        self.set_header("Content-Type", metrics.CONTENT_TYPE)
        self.finish(metrics.render(found.devices, found.sessions, found.sharing))


ROUTES: tuple[tuple[str, type[SingHandler]], ...] = (
    (r"status", StatusHandler),
    (r"activity", ActivityHandler),
    (r"devices", DevicesHandler),
    (r"sessions", SessionsHandler),
    (r"sessions/([0-9A-Za-z_-]+)", SessionHandler),
    (
        r"sessions/([0-9A-Za-z_-]+)/(suspend|resume|migrate|pin|unpin|priority|deterministic)",
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
