"""The core of a session: its identity, its lock and its state. All parts of a session use it.

Note [Reconciling]: all changes to a session happen under its lock, in one of two ways: its own task
reconciles it with what the shared pages and the worker ask for, and commands (suspend, resume) come
from requests. A client rings after it wrote what it wants, and not again until the agent page's
bell has moved. So reconciling first moves the bell and then reads: a later write rings again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kernelproxy.agent.devices.device_allocator import DeviceAllocator, Tenant
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.states import TRAITS, State, check_transition
from kernelproxy.agent.workers.crash_policy import PAUSE_MIN
from kernelproxy.common.errors import ControlError, InternalError
from kernelproxy.common.protocol import OpenSession

log = logging.getLogger(__name__)


class Inhibitor(StrEnum):
    """Condition that forbids an act on a session while it lasts."""

    #: Its user has pinned it: it is neither suspended for others nor hibernated.
    PIN = "pin"
    #: The kernel is to do something between two cells: no hibernation, and a hold ends.
    CHECKPOINT_REQUEST = "checkpoint request"
    #: An automatic checkpoint is being made: no hibernation.
    AUTO_CHECKPOINT = "automatic checkpoint"
    #: It hibernates: the reason for that stays, whatever happens to its state.
    HIBERNATION = "hibernation"
    #: Processes that its process has started have sessions: no hibernation.
    CHILDREN = "children"


class SessionHooks(Protocol):
    """The whole session, as its parts use it."""

    def persist(self) -> None:
        """Give the supervisor what the next agent needs; see Note [Persisting]."""

    def changed(self) -> None:
        """Note that its user-visible state may have changed."""

    def state_changed(self) -> None:
        """Record its state."""

    def happened(self, kind: str, text: str) -> None:
        """Record an event: a kind as in ``openapi.yaml``, and a sentence."""

    def unlocked(self) -> None:
        """Note that its lock is free, and no task waits for it."""

    def fail(self, reason: str) -> None:
        """Fail it for good."""

    def close(self, why: str, *, died: bool = False) -> asyncio.Task[None]:
        """Close it."""


@dataclass(frozen=True)
class Identity:
    """The constant facts about a session.

    Parameters
    ----------
    id : str
    request : OpenSession
    owner : int
        User id.
    shared : bool
        True if the daemon serves other users, too, and so must not trust the session's owner.
    """

    id: str
    request: OpenSession
    owner: int
    shared: bool


class SessionCore:
    """Identity, lock and state of one session.

    Parameters
    ----------
    identity : Identity
    allocator : DeviceAllocator
        Its device.
    hooks : SessionHooks
    """

    #: The session as its device's allocator uses it; set before the session is used.
    tenant: Tenant

    def __init__(self, identity: Identity, allocator: DeviceAllocator, hooks: SessionHooks) -> None:
        self.id, self.request, self.owner = identity.id, identity.request, identity.owner
        self.shared, self.allocator = identity.shared, allocator
        #: Name of its user, as policies spell it.
        self.user = self.request.user or reasons.user_name(self.owner)
        self.state, self.reason, self.since = State.IDLE, reasons.UNUSED, time.monotonic()
        #: True if it is closing or closed.
        self.closing = False
        self.inhibitors: dict[Inhibitor, Callable[[], bool]] = {}
        #: Done when it is not queued any more; None if no task waits for that.
        self.left_queue: asyncio.Future[None] | None = None
        self._hooks = hooks
        self._lock = asyncio.Lock()
        #: Number of tasks that hold its lock or wait for it.
        self.lock_waiters = 0
        #: True while its own reconcile loop waits for the lock.
        self.reconciler_waits = False
        #: Set if it is to be reconciled.
        self.reconcile_due = asyncio.Event()
        #: Set if long work of the lock's holder may have to give way, or memory may be wanted.
        self.wakeup = asyncio.Event()

    # ---------------------------------------------------------------- its identity

    @property
    def name(self) -> str:
        """Name of the notebook or program."""
        return self.request.name

    @property
    def kernel_id(self) -> str:
        """Id of its kernel, as Jupyter knows it."""
        return self.request.kernel_id

    @property
    def python(self) -> str:
        """Its interpreter."""
        return self.request.python

    @property
    def script(self) -> bool:
        """True if it is a program, not a notebook."""
        return self.request.script

    @property
    def notebook(self) -> str:
        """Path of its notebook."""
        return self.request.notebook

    # ---------------------------------------------------------------- its state

    def request_reconcile(self) -> None:
        """Make its task reconcile the session."""
        self.reconcile_due.set()
        self.wakeup.set()

    def inhibited(self, *inhibitors: Inhibitor) -> bool:
        """Return True if one of these inhibitors is in force."""
        return any(each in self.inhibitors and self.inhibitors[each]() for each in inhibitors)

    def check_usable(self) -> None:
        """Raise ControlError if it has failed or is closing."""
        if self.state is State.FAILED or self.closing:
            raise ControlError(f"Session {self.id} has ended: {self.reason}", "ended")

    def set_state(self, state: State, reason: str) -> None:
        """Change state, if the table allows it."""
        check_transition(self.state, state)
        if (state, reason) != (self.state, self.reason):
            self.changed()
        before, self.state, self.reason = self.state, state, reason
        self._hooks.state_changed()
        if state is not before:
            self.since = time.monotonic()
            log.info("Session %s: %s, was %s: %s", self.id, state, before, reason)
            if not (TRAITS[state].has_worker and TRAITS[before].has_worker):
                self.persist()
        if state is not State.QUEUED and self.left_queue is not None:
            self.left_queue.set_result(None)
            self.left_queue = None

    def persist(self) -> None:
        """See `SessionHooks`."""
        self._hooks.persist()

    def changed(self) -> None:
        """See `SessionHooks`."""
        self._hooks.changed()

    def happened(self, kind: str, text: str) -> None:
        """See `SessionHooks`."""
        self._hooks.happened(kind, text)

    def note_state(self) -> None:
        """Record its state again, as it is on another device."""
        self._hooks.state_changed()

    def fail(self, reason: str) -> None:
        """See `SessionHooks`."""
        self._hooks.fail(reason)

    def close(self, why: str, *, died: bool = False) -> asyncio.Task[None]:
        """See `SessionHooks`."""
        return self._hooks.close(why, died=died)

    # ---------------------------------------------------------------- its lock

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold its lock, and count the waiters: see Note [Locks] in `devices.device_allocator`.

        An unexpected exception fails this session, and only this one. A lack of system resources
        does not: it is retried.
        """
        self.lock_waiters += 1
        if self._lock.locked():
            self.wakeup.set()  # long work of the lock's holder may give way to us
        try:
            async with self._lock:
                yield
        except ControlError:
            raise
        except (OSError, MemoryError) as error:  # a lack of the machine, not the session's fault
            log.warning("Session %s tries again: %s", self.id, error)
            asyncio.get_running_loop().call_later(PAUSE_MIN, self.request_reconcile)
            raise InternalError(f"{error}: try again.") from error
        except Exception as error:
            log.exception("Session %s failed", self.id)
            self.fail(f"Something is wrong with jupyter_sing itself: {error}")
            raise InternalError(str(error)) from error
        finally:
            self.lock_waiters -= 1
            if not self.lock_waiters:
                self._hooks.unlocked()

    @contextlib.asynccontextmanager
    async def locked_at_last(self) -> AsyncIterator[None]:
        """Hold its lock to free what it has; nothing waits for the session after that."""
        async with self._lock:
            yield

    @property
    def busy(self) -> bool:
        """True if its lock is held."""
        return self._lock.locked()

    @property
    def awaited(self) -> bool:
        """True if a task other than its own reconcile loop waits for its lock, or it is closing."""
        return self.closing or self.lock_waiters - self.reconciler_waits > 1
