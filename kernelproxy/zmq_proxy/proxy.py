"""Stands between a kernel's clients and its process, so that the process may go and come.

It listens on the ports that the clients know. The process listens on ports of its own, to which
messages are passed, untouched and in order. Requests can be *held*: they stay where they are while
replies and output pass. A process that is to get requests must first have shown that its output
arrives here; so nothing it prints is lost, whatever process it is.

While the kernel has no process at all (*detached*), heartbeats are answered here, and what needs no
process is, too. The first request that needs one makes it *knock*. What programs send by themselves
(heartbeats, questions for the use of memory) does not: a kernel that they keep awake would never
hibernate.
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


class Switchboard:
    """Listens from its making until `close`. Its methods may be called by any thread.

    Parameters
    ----------
    connection : Connection
        Where clients expect the kernel.
    on_knock : callable
        Called in the switchboard's thread, once per `detach`, when a request needs a process.
    on_shutdown : callable
        Called in that thread when a client ends a kernel that has no process.

    Raises
    ------
    ProcessError
        If it cannot listen there.
    """

    def __init__(
        self,
        connection: Connection,
        on_knock: Callable[[], object],
        on_shutdown: Callable[[], object],
    ) -> None:
        self._exchange = Exchange(connection, on_knock, on_shutdown)
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
        """Whether it passes messages on."""
        return self._thread.is_alive()

    # Orders.

    def connect(self, connection: Connection) -> None:
        """Let requests through to a process, as soon as it is ready. Does not wait for it."""
        self._call(lambda: self._exchange.connect(connection))

    def pause(self) -> None:
        """Let no more requests through; what the process executes now is its last."""
        self._call(self._exchange.pause)

    def hold(self, seconds: float) -> None:
        """Let no more requests through, and wait until the process has dealt with all before.

        Raises
        ------
        ProcessError
            If that takes longer than `seconds`; then requests go through again.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.hold(deadline))

    def let_through(self) -> None:
        """Let requests through again, first those that have waited."""
        self._call(self._exchange.let_through)

    def freeze(self, frozen: bool) -> None:
        """Answer heartbeats for a process that stands still, or do so no more."""
        self._call(lambda: self._exchange.freeze(frozen))

    def detach(self) -> None:
        """There is no process any more. Requests are held, and the first one knocks."""
        self._call(self._exchange.detach)

    def listen(self) -> None:
        """There still is no process, though it was tried: the next request knocks again."""
        self._call(self._exchange.listen)

    def prepare(self, connection: Connection, seconds: float, beside: bool) -> None:
        """Connect to another process, and wait until it is ready. It gets no requests yet.

        Parameters
        ----------
        connection : Connection
        seconds : float
        beside : bool
            Whether there is a process that it is to replace; its output is not shown until then.

        Raises
        ------
        ProcessError
            If it is not ready in time; then it is forgotten.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.prepare(connection, deadline, beside))

    def adopt(self) -> None:
        """The process of `prepare` is the kernel's from now on. Requests are held."""
        self._call(self._exchange.adopt)

    def replace(self, seconds: float) -> None:
        """Let the process of `prepare` take the present one's place, and let requests through.

        What the present one executed at `pause` is answered by it. What it has not answered else
        is asked of the new one, in the same order, before anything new.

        Raises
        ------
        ProcessError
            If it does not finish that in time.
        """
        deadline = time.monotonic() + seconds
        self._call(lambda: self._exchange.replace(deadline))

    def discard(self) -> None:
        """Forget the process of `prepare`."""
        self._call(self._exchange.discard)

    def close(self) -> None:
        """Stop, and free the ports. Doing it twice is no error."""
        if os.getpid() != self._pid:
            return  # the thread is the parent's, and so are the ports
        with self._lock:
            self._ending = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def disown(self) -> None:
        """Called in a forked child: the ports, and who is connected to them, are the parent's."""
        fork_hygiene.let_go([*fork_hygiene.sockets_at(self._ports), self._wake])

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
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the server's
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
        """Wait until something happens, and deal with it."""
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
        self._exchange.look()
        self._look()

    def _milliseconds(self) -> int | None:
        """How long to wait at most; as long as it takes, when nothing has been begun."""
        times = [awaited.deadline for awaited in self._awaited.values()]
        if (due := self._exchange.due()) is not None:
            times.append(due)
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _obey(self) -> None:
        """Carry out orders."""
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

    def _look(self) -> None:
        """See which orders are done."""
        for done, awaited in list(self._awaited.items()):
            if awaited.until():
                del self._awaited[done]
                done.set_result(None)
            elif awaited.deadline <= time.monotonic():
                del self._awaited[done]
                done.set_exception(awaited.otherwise())


def _closed() -> ProcessError:
    return ProcessError("the kernel has ended", "unavailable")
