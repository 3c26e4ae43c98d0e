"""A process group: its members, and the order of their calls.

The collectives of a group are numbered. Each is described by a text, which every frame carries, so
that ranks that call different things notice. A rank that notices, or that fails halfway, notifies
the others: a group that has failed once is unusable, as with NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from kernelproxy.kernel.collectives.transport.connections import Frame, Peer, PeerLostError
from kernelproxy.kernel.collectives.transport.endpoint import Endpoint, SessionEndedError, endpoint
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
from kernelproxy.kernel.collectives.transport.waits import BackgroundThread

_POLL_SECONDS = 0.005
Name = tuple[int, int]
"""Of what a collective contributes or results in: see Note [Names] in `transfers`."""


class Group:
    """A process group.

    Parameters
    ----------
    name : str
        As ``torch.distributed`` names it, for errors.
    rank, size : int
        Of this process, and of the group.
    store : torch.distributed.Store
        Where members find each other; all of them use the same prefix.
    own : Endpoint, optional
        The endpoint of this rank; that of the process by default.
    """

    def __init__(
        self, name: str, rank: int, size: int, store: Any, own: Endpoint | None = None
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._store = store
        self._own = own
        self._endpoint: Endpoint | None = None
        #: The same for all members, and of no other group; empty: there are no others.
        self.token = b""
        self._identity = 0
        self._peers: dict[int, Peer] = {}
        # Members to which, and from which, the first frame has been sent.
        self._greeted, self._met = set[int](), set[int]()
        self._joining = threading.Lock()
        self._number = 0
        # Calls whose announcements by other ranks have not been compared yet.
        self._calls: dict[int, str] = {}
        self._lanes: dict[object, Lane] = {}
        self._count = 0
        if size > 1:
            # Processes may destroy a group and make it again, with the same name and in the same
            # store: as torchrun's. Members have made it the same number of times.
            self._count = store.add(f"jupyter_sing/{rank}", 1)
            store.set(self._key(rank), f"{secrets.token_hex(8)} {(own or endpoint()).address}")

    def __repr__(self) -> str:
        return f"process group {self.name!r}"

    # ------------------------------------------------------------ members

    def _join(self) -> Endpoint:
        """Find and connect all members, at the first call."""
        with self._joining:
            if self._endpoint is None:
                own = self._own or endpoint()
                members = [self._member(rank, own) for rank in range(self.size)]
                for rank, member in enumerate(members):
                    if rank != self.rank:
                        self._peers[rank] = own.peer(member.split(" ", 1)[1])
                text = " ".join([self.name, *members])
                self.token = hashlib.blake2b(text.encode(), digest_size=16).digest()
                self._identity = int.from_bytes(self.token[:8], "little")
                self._endpoint = own
            return self._endpoint

    def _key(self, rank: int) -> str:
        return f"jupyter_sing/{rank}/{self._count}"

    def _member(self, rank: int, own: Endpoint) -> str:
        """Wait for a member; return what identifies it, and its address."""
        key = self._key(rank)
        try:
            if not self._store.check([key]):
                with own.waiting():
                    while not self._store.check([key]):
                        self._check_session(own)
                        time.sleep(_POLL_SECONDS)
            return str(self._store.get(key).decode())
        except distributed.DistBackendError:
            raise
        except RuntimeError as error:  # of torch.distributed
            raise distributed.DistBackendError(
                f"{self!r}: rank {rank} cannot be found, as the store does not answer ({error})"
            ) from error

    def _check_session(self, own: Endpoint) -> None:
        if own.session_ended:
            raise distributed.DistBackendError(self._without_session())

    def _without_session(self) -> str:
        return f"{self!r}: the device session of rank {self.rank} has ended"

    def _meet(self) -> None:
        """Wait, at the first collective, until all members have found each other.

        The store may end with the first process that is done, which need not wait for the others
        in a collective like ``scatter``.
        """
        for rank in self._peers.keys() - self._greeted:
            self.send(rank, Header(FrameKind.collective, text="meet"), None)
            self._greeted.add(rank)
        for rank in self._peers.keys() - self._met:
            self.receive(rank, FrameKind.collective)
            self._met.add(rank)

    @contextlib.contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        try:
            yield
        except PeerLostError:
            text = f"{self!r}: the process of rank {rank} has ended"
            raise distributed.DistBackendError(text) from None
        except SessionEndedError:
            raise distributed.DistBackendError(self._without_session()) from None
        except RuntimeError as error:
            raise distributed.DistBackendError(str(error)) from None

    # ------------------------------------------------------------ calls

    def begin(self, text: str) -> Call:
        """Return the next collective of this group; called in the same order by all members."""
        self._number += 1
        return Call(self, self._number, text)

    def lane(self, key: object = None) -> Lane:
        """Return where tasks are executed in order: the collectives, or what else has one key."""
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes.setdefault(key, Lane(f"sing-group-{self.name}"))
        return found

    def close(self) -> None:
        """End the group's threads, after their tasks; drop what has arrived."""
        for lane in self._lanes.values():
            lane.close()
        if self._endpoint is not None:
            self._endpoint.forget(self._identity)

    def fail(self, text: str) -> None:
        """Make the group unusable, on all ranks: others may wait for what will not come."""
        if self._endpoint is None or self._identity in self._endpoint.failures:
            return
        self._endpoint.failures[self._identity] = text
        header = Header(FrameKind.failure, self._identity, source=self.rank, text=text).encode()
        for peer in self._peers.values():
            with contextlib.suppress(PeerLostError):
                peer.send(header, memoryview(b""), self._endpoint.waiting)

    # ------------------------------------------------------------ frames

    def send(self, to: int, header: Header, content: torch.Tensor | None) -> None:
        """Send a frame to a member; `content` is contiguous."""
        own = self._join()
        whole = replace(header, group=self._identity, source=self.rank)
        with self._losing(to):
            own.send(self._peers[to], whole, content)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of the host, for what will be sent."""
        if self.size == 1:
            return torch.empty(count, dtype=dtype)
        return self._join().outbox.empty(count, dtype)

    def receive(self, source: int, kind: FrameKind, tag: int = 0) -> Frame:
        """Wait for the next frame of a member."""
        own = self._join()
        with self._losing(source):
            return own.receive((self._identity, source, kind, tag), self._peers[source])

    def start(self, call: Call) -> None:
        """Compare what other ranks have announced for earlier calls, and check that none failed."""
        own = self._join()
        if text := own.failures.get(self._identity):
            raise distributed.DistBackendError(text)
        self._meet()
        self._calls[call.number] = call.text
        for source in self._peers:
            stream = (self._identity, source, FrameKind.collective, 0)
            while (number := own.next_number(stream)) is not None and number < call.number:
                self.compare(call, self.receive(source, FrameKind.collective))
        # What a slower rank announces for an older call is not compared any more.
        self._calls.pop(call.number - 1000, None)

    def compare(self, call: Call, frame: Frame) -> bool:
        """Return whether a frame belongs to a call; raise if its sender called something else."""
        header = frame.header
        mine = call.text
        if header.number <= call.number:
            mine = self._calls.get(header.number, header.text)
            if mine == header.text:
                return header.number == call.number
        raise distributed.DistBackendError(
            f"{self!r}: the ranks call different collectives: rank {header.source} calls "
            f"{header.text}, and rank {self.rank} calls {mine}"
            + (" before it" if header.number > call.number else "")
        )


class Lane:
    """Tasks of a group that are executed one after the other; its thread exists if it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # What each task replaces; None: unknown.
        self._pending: deque[frozenset[int] | None] = deque()
        self._settled = threading.Condition()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        """Execute a task here, after those that were submitted."""
        if self._pending:
            with self._settled:
                self._settled.wait_for(lambda: not self._pending)
        task()

    def submit(
        self,
        task: Callable[[], None],
        replaces: frozenset[int] | None = None,
        ahead: Callable[[], None] | None = None,
    ) -> None:
        """Execute a task on the lane's thread; it must not raise.

        Parameters
        ----------
        task : callable
        replaces : frozenset of int
            All storages that it changes, if that is known.
        ahead : callable
            Called before, unless an earlier task may change these storages meanwhile.
        """
        with self._settled:
            alone = replaces is not None and all(
                each is not None and replaces.isdisjoint(each) for each in self._pending
            )
            self._pending.append(replaces)
            if self._thread is None:
                self._thread = BackgroundThread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        if ahead is not None and alone:
            ahead()
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after its tasks."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it keeps tensors
            with self._settled:
                self._pending.popleft()
                self._settled.notify_all()


class Call:
    """One collective, as one rank takes part in it.

    Parameters
    ----------
    group : Group
        Its group.
    number : int
        Which of the group's collectives it is.
    text : str
        What is called.
    """

    def __init__(self, group: Group, number: int, text: str) -> None:
        self.group, self.number, self.text = group, number, text
        self.rank, self.size = group.rank, group.size
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]
        """All other ranks, in an order in which not all begin with the same one."""

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """While this rank takes part; if it fails, the others learn why."""
        if self.size == 1:
            yield
            return
        try:
            self.group.start(self)
            yield
        except distributed.DistBackendError as error:
            self.group.fail(str(error))
            raise
        except Exception as error:
            self.group.fail(f"{self.group!r}: rank {self.rank} failed in {self.text}: {error}")
            raise

    def name(self, *what: object) -> Name | None:
        """Return a name for something in this call, on all ranks the same; None: it needs none."""
        if not self.group.token:
            return None
        text = repr((self.number, what)).encode()
        found = hashlib.blake2b(text, key=self.group.token, digest_size=16).digest()
        return int.from_bytes(found[:8], "little"), int.from_bytes(found[8:], "little")

    def names(self, *what: object) -> Callable[[int], Name | None]:
        """Return a function that returns the names of numbered things."""
        return lambda number: self.name(*what, number)

    def send(self, to: int, content: torch.Tensor | None = None, stage: int = 0) -> None:
        """Send a part to a rank; without content, announce the call."""
        header = Header(FrameKind.collective, number=self.number, stage=stage, text=self.text)
        self.group.send(to, header, content)

    def receive(self, source: int, like: torch.Tensor | None, stage: int = 0) -> torch.Tensor:
        """Wait for a part from a rank, of the dtype and number of elements of `like`.

        Raises
        ------
        DistBackendError
            The rank calls something else, sends another size, or has ended.
        """
        while True:
            frame = self.group.receive(source, FrameKind.collective)
            if not self.group.compare(self, frame):
                continue
            if frame.header.stage == stage:
                break
            if frame.header.stage > stage:
                raise distributed.DistBackendError(
                    f"{self.group!r}: {self.text} was interrupted on rank {source}"
                )
        return self._checked(source, frame, like)

    def _checked(self, source: int, frame: Frame, like: torch.Tensor | None) -> torch.Tensor:
        expected = 0 if like is None else like.numel() * like.element_size()
        if len(frame.content) != expected:
            raise distributed.DistBackendError(
                f"{self.group!r}: {self.text}: rank {source} sends {len(frame.content)} bytes, and "
                f"rank {self.rank} expects {expected}"
            )
        return frame.content if like is None else as_type(frame.content, like)


def as_type(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return received bytes as a flat tensor of the dtype of `like`."""
    if not len(content):
        return torch.empty(0, dtype=like.dtype)
    return content.view(like.dtype)
