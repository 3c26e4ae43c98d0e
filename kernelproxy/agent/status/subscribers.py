"""Subscribers to changes of sessions and devices, and when they are notified.

Sessions report that something about them may have changed (`Subscribers.note`), which costs next to
nothing. Shortly later they are described, and all subscribers receive what differs from the last
notification. The shared pages of sessions that execute change without a report: these sessions are
polled, as long as there are any and there is a subscriber.

Note [Slow watchers]: what is pending for a subscriber is a set of ids. So one that reads slowly is
notified less often; its messages do not pile up. One that does not read at all for a while is
disconnected; it may connect again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping

from kernelproxy.agent.devices.device_allocator import DeviceAllocator
from kernelproxy.agent.lifecycle.session import Session
from kernelproxy.agent.session.states import TRAITS
from kernelproxy.agent.status import session_status
from kernelproxy.common.ipc.channel import Channel, close_fds
from kernelproxy.common.protocol import Changed, StatusReply
from kernelproxy.common.protocol.views import DeviceView, SessionView, SharingView

#: Delay from a report to the notification, and so between two messages to one subscriber.
NOTIFY_SECONDS = 0.1
#: Interval of polling sessions that execute.
POLL_SECONDS = 0.5
#: Time limit for a subscriber to read a message.
READ_SECONDS = 20.0
#: Smallest change of memory that is sent: a part of its device, or a number of bytes.
MEMORY_PART, MEMORY_BYTES = 0.01, 16 << 20
#: Smallest change of the expected wait that is sent: seconds, or a part of it.
WAIT_SECONDS, WAIT_PART = 1.0, 0.1
_NOTIFIED_FIELDS = (
    "state", "tier", "device", "reason", "name", "pinned", "priority", "served_as", "recoverable",
    "last_checkpoint", "progress", "queue_position", "worker_pid", "shared", "job", "rank", "ranks",
)  # fmt: skip


def differs(before: SessionView, now: SessionView, seconds: float, memory_total: int) -> bool:
    """Return True if a change of a session is to be sent.

    Parameters
    ----------
    before, now : dict
        Descriptions of it, see `session_status.describe_session`.
    seconds : float
        Time between the two.
    memory_total : int
        Memory of its device, in bytes.
    """
    if any(before.get(each) != now.get(each) for each in _NOTIFIED_FIELDS):
        return True
    step = min(MEMORY_PART * memory_total, MEMORY_BYTES)
    grown: int = abs(now["memory"] - before["memory"])
    if grown > step or (grown and not now["memory"]):
        return True
    waited, waits = before.get("expected_wait"), now.get("expected_wait")
    if waited is None or waits is None:
        return waited is not waits
    return bool(abs(waited - seconds - waits) > max(WAIT_SECONDS, WAIT_PART * waited))


class Subscribers:
    """All subscribers.

    Parameters
    ----------
    sessions : mapping
        The present sessions, by id.
    allocators : mapping
        By id of the device.
    """

    def __init__(
        self, sessions: Mapping[str, Session], allocators: Mapping[str, DeviceAllocator]
    ) -> None:
        self._sessions, self._allocators = sessions, allocators
        self._watchers: set[_Subscriber] = set()
        self._noted: set[str] = set()
        #: Last description sent of each session, and when; empty without subscribers.
        self._notified: dict[str, tuple[SessionView, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def __len__(self) -> int:
        """Return the number of subscribers."""
        return len(self._watchers)

    def note(self, session: Session) -> None:
        """Note that something about a session may have changed, or that it has ended."""
        if self._watchers:
            self._noted.add(session.id)
            self._schedule(NOTIFY_SECONDS)

    def note_devices(self) -> None:
        """Note that something about a device has changed."""
        for each in self._watchers:
            each.notify_of_devices()

    def _schedule(self, seconds: float) -> None:
        due = time.monotonic() + seconds
        if due < self._due:
            self._cancel_timer()
            self._due = due
            self._timer = asyncio.get_running_loop().call_later(seconds, self._notify)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf

    def _notify(self) -> None:
        """Describe the sessions that were noted or execute, and send what differs."""
        self._cancel_timer()
        noted, self._noted = self._noted, set()
        moving, there = False, self._there()
        for session in there:
            if session.id in noted or session.id not in self._notified or _moves(session):
                self._refresh(session)
            moving |= _moves(session)
        for name in self._notified.keys() - {each.id for each in there}:
            del self._notified[name]
            self._notify_all(name)
        if self._noted - noted:  # describing one session may have changed another
            self._schedule(NOTIFY_SECONDS)
        elif moving:
            self._schedule(POLL_SECONDS)

    def _there(self) -> list[Session]:
        return [each for each in self._sessions.values() if not each.device_state.closed]

    def _refresh(self, session: Session) -> SessionView:
        """Describe a session, and send the description if it differs from the last one."""
        now, described = time.monotonic(), session_status.describe_session(session)
        notified, total = self._notified.get(session.id), session.core.allocator.device.memory_total
        if notified is None or differs(notified[0], described, now - notified[1], total):
            self._notified[session.id] = described, now
            self._notify_all(session.id)
        return described

    def _notify_all(self, session: str) -> None:
        for each in self._watchers:
            each.notify(session)

    async def serve(self, channel: Channel, only: Session | None, sharing: SharingView) -> None:
        """Send a subscriber the current state and then changes, until it disconnects.

        Parameters
        ----------
        channel : Channel
            The caller keeps ownership.
        only : Session, optional
            The only session that it subscribes to.
        sharing : dict
            See `StatusReply`.

        Raises
        ------
        OSError
            If it has disconnected, or does not read.
        """
        uid, watcher = channel.peer()[1], _Subscriber(only)
        # Before it is added, so that later changes are relative to what it receives here.
        known = [
            self._refresh(each)
            for each in self._there()
            if only in (None, each) or each.id not in self._notified
        ]
        self._watchers.add(watcher)
        self._schedule(POLL_SECONDS)
        views = [self._view(each, uid) for each in known if only is None or each["id"] == only.id]
        reply = StatusReply(watcher.learn(self._devices()), views, sharing)
        disconnecting = asyncio.create_task(_wait_disconnected(channel))
        notifying = asyncio.create_task(
            channel.charged(self._send_changes(watcher, channel, uid, reply))
        )
        try:
            await asyncio.wait({disconnecting, notifying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave(watcher)
            for task in (disconnecting, notifying):
                task.cancel()
            await asyncio.gather(disconnecting, notifying, return_exceptions=True)
        if not notifying.cancelled():
            notifying.result()

    def _leave(self, watcher: _Subscriber) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._cancel_timer()
            self._notified.clear()
            self._noted.clear()

    async def _send_changes(
        self, watcher: _Subscriber, channel: Channel, uid: int, reply: StatusReply
    ) -> None:
        message: StatusReply | Changed | None = reply
        while True:
            if message is not None:
                async with asyncio.timeout(READ_SECONDS):  # a TimeoutError is an OSError
                    await channel.send(message)
            await asyncio.sleep(NOTIFY_SECONDS)
            await watcher.wait()
            await channel.turn()
            message = self._news(watcher, uid)

    def _news(self, watcher: _Subscriber, uid: int) -> Changed | None:
        """Return what a subscriber has not received yet; None if there is nothing."""
        names = watcher.take()
        views = [
            self._view(self._notified[each][0], uid) for each in names if each in self._notified
        ]
        gone = [each for each in names if each not in self._notified]
        devices = watcher.learn(self._devices())
        return Changed(views, devices, gone) if views or gone or devices else None

    def _view(self, described: SessionView, uid: int) -> SessionView:
        """Return a session's description as a user may see it."""
        there = self._sessions.get(described["id"])
        return session_status.shown(described, there.core.owner if there is not None else 0, uid)

    def _devices(self) -> list[DeviceView]:
        notified = [each for each, _ in self._notified.values()]
        return [
            session_status.describe_device(each, notified) for each in self._allocators.values()
        ]


class _Subscriber:
    """Pending notifications for one subscriber; see Note [Slow watchers]."""

    def __init__(self, only: Session | None) -> None:
        self._only, self._names = only, dict[str, None]()
        self._devices: dict[str, DeviceView] = {}
        self._something = asyncio.Event()

    def notify(self, session: str) -> None:
        """Note that a session has changed."""
        if self._only is None or self._only.id == session:
            self._names[session] = None
            self._something.set()

    def notify_of_devices(self) -> None:
        """Note that a device has changed."""
        self._something.set()

    async def wait(self) -> None:
        """Wait until something is pending."""
        await self._something.wait()

    def take(self) -> list[str]:
        """Return and clear the pending session ids."""
        self._something.clear()
        names = list(self._names)
        self._names.clear()
        return names

    def learn(self, devices: list[DeviceView]) -> list[DeviceView]:
        """Return the descriptions of devices that have changed, and note them as sent."""
        changed = [each for each in devices if self._devices.get(each["id"]) != each]
        self._devices.update((each["id"], each) for each in changed)
        return changed


def _moves(session: Session) -> bool:
    """Return True if its shared pages may change without a report."""
    state = session.core.state
    return TRAITS[state].changes_unreported or session.requests.underway.describe() is not None


async def _wait_disconnected(channel: Channel) -> None:
    """Wait for the subscriber to disconnect; discard anything it sends."""
    with contextlib.suppress(ConnectionError):
        while True:
            close_fds((await channel.receive())[1])
