"""ZMQ proxy between a kernel's clients and its process, so that the process can be replaced.

It listens on the ports that the clients know. The process listens on ports of its own, to which
messages are forwarded, unchanged and in order. Requests can be *held*: they stay queued while
replies and output pass. Before a process gets requests, its output must have arrived here; so no
output is lost, of whichever process.

While the kernel has no process at all (*detached*), the proxy answers heartbeats, and requests that
need no process. At the first request that needs one it *asks for a process*. Messages that programs
send periodically (heartbeats, requests for the memory usage) do not: otherwise the kernel would
never hibernate.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import zmq

from kernelproxy.common import fork_hygiene
from kernelproxy.common.errors import ProcessError
from kernelproxy.zmq_proxy.connection import Connection
from kernelproxy.zmq_proxy.router import Awaited, Exchange, Handler, drain

Order = Callable[[], Awaited | None]


class ZmqProxy:
    """Proxy that listens from its construction until `close`. Thread-safe.

    Parameters
    ----------
    connection : Connection
        Addresses at which clients expect the kernel.
    on_request : callable
        Called in the proxy's thread, once per `detach`, when a request needs a process.
    on_shutdown : callable
        Called in that thread when a client ends a kernel that has no process.

    Raises
    ------
    ProcessError
        If it cannot listen at these addresses.
    """

    def __init__(
        self,
        connection: Connection,
        on_request: Callable[[], object],
        on_shutdown: Callable[[], object],
    ) -> None:
        self._exchange = Exchange(connection, on_request, on_shutdown)
        self._ports = list(connection.ports.values())
        self._pid = os.getpid()
        self._orders: deque[tuple[Order, Future[None]]] = deque()
        self._awaited: dict[Future[None], Awaited] = {}
        self._key: object = None
        self._handlers: dict[zmq.Socket[bytes], Handler] = {}
        self._poller = zmq.Poller()
        self._lock = threading.Lock()
        self._ending = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, name="jupyter_sing switchboard", daemon=True
        )
        fork_hygiene.register(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while it forwards messages."""
        return self._thread.is_alive()

    # Commands.

    def connect(self, connection: Connection) -> None:
        """Let requests through to a process, as soon as it is ready. Does not wait for it."""
        self._call(lambda: self._exchange.connect(connection))

    def pause(self) -> None:
        """Let no more requests through; the request in progress is the process's last."""
        self._call(self._exchange.pause)

    def hold(self, seconds: float) -> None:
        """Let no more requests through, and wait until the process has completed the earlier ones.

        Raises
        ------
        ProcessError
            If that takes longer than `seconds`; then requests go through again.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.hold(deadline))

    def let_through(self) -> None:
        """Let requests through again, starting with the queued ones."""
        self._call(self._exchange.let_through)

    def freeze(self, frozen: bool) -> None:
        """Start or stop answering heartbeats for a process that is stopped."""
        self._call(lambda: self._exchange.freeze(frozen))

    def detach(self) -> None:
        """Record that there is no process. The first of the requests held asks for one."""
        self._call(self._exchange.detach)

    def listen(self) -> None:
        """Record that a restore has failed: the next request asks for a process again."""
        self._call(self._exchange.listen)

    def prepare(self, connection: Connection, seconds: float, beside: bool) -> None:
        """Connect to another process, and wait until it is ready. It gets no requests yet.

        Parameters
        ----------
        connection : Connection
        seconds : float
        beside : bool
            True if it will replace a process; until then, its output is not forwarded.

        Raises
        ------
        ProcessError
            If it is not ready in time; then it is discarded.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.prepare(connection, deadline, beside))

    def adopt(self) -> None:
        """Make the process of `prepare` the kernel's. Requests are held."""
        self._call(self._exchange.adopt)

    def replace(self, seconds: float) -> None:
        """Replace the current process by the process of `prepare`, and let requests through.

        The current process answers the request that it executed at `pause`. Its other unanswered
        requests are sent to the new one, in the same order, before any new ones.

        Raises
        ------
        ProcessError
            If it does not complete that in time.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.replace(deadline))

    def discard(self) -> None:
        """Disconnect from the process of `prepare`."""
        self._call(self._exchange.discard)

    def close(self) -> None:
        """Stop, and free the ports. Idempotent."""
        if os.getpid() != self._pid:
            return  # the thread and the ports belong to the parent
        with self._lock:
            self._ending = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def disown(self) -> None:
        """Called in a forked child: ports and connections belong to the parent."""
        fork_hygiene.redirect_to_null([*fork_hygiene.sockets_at(self._ports), self._wake])

    def _call(self, order: Order) -> None:
        done: Future[None] = Future()
        with self._lock:
            if self._ending or self._wake < 0:
                raise _closed()
            self._orders.append((order, done))
            os.eventfd_write(self._wake, 1)
        done.result()

    # In the thread.

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for the server's thread
        try:
            while not self._ending:
                self._turn()
        finally:
            with self._lock:
                self._ending = True
                os.close(self._wake)
                self._wake = -1
            for done in [*(done for _, done in self._orders), *self._awaited]:
                done.set_exception(_closed())
            self._exchange.close()

    def _turn(self) -> None:
        """Wait for events, and handle them."""
        if self._exchange.key() != self._key:
            self._key, self._handlers = self._exchange.key(), self._exchange.handlers()
            self._poller = zmq.Poller()
            for sock in (self._wake, *self._handlers):
                self._poller.register(sock, zmq.POLLIN)
        fired = dict(self._poller.poll(self._milliseconds()))
        for sock, handler in self._handlers.items():
            if sock in fired:
                drain(sock, handler)
        if self._wake in fired:
            os.eventfd_read(self._wake)
            self._obey()
        self._exchange.check()
        self._check()

    def _milliseconds(self) -> int | None:
        """Return the maximum time to wait; None if nothing is due."""
        times = [awaited.deadline for awaited in self._awaited.values()]
        if (due := self._exchange.due()) is not None:
            times.append(due)
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _obey(self) -> None:
        """Carry out commands."""
        while self._orders:
            order, done = self._orders.popleft()
            try:
                awaited = order()
            except ProcessError as error:
                done.set_exception(error)
            else:
                if awaited is None:
                    done.set_result(None)
                else:
                    self._awaited[done] = awaited

    def _check(self) -> None:
        """Complete the commands that are done or have timed out."""
        for done, awaited in list(self._awaited.items()):
            if awaited.until():
                del self._awaited[done]
                done.set_result(None)
            elif awaited.deadline <= time.monotonic():
                del self._awaited[done]
                done.set_exception(awaited.otherwise())


def _closed() -> ProcessError:
    return ProcessError("the kernel has ended", "unavailable")
