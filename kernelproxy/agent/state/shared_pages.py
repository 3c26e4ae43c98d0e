"""The shared pages of a session: their meaning, and what the agent writes on its own page."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernelproxy.common.shared_memory import Presence, SessionMemory
from kernelproxy.devices import Device


class MemoryRequest(NamedTuple):
    """A client's request for device memory, for whose answer it waits.

    Parameters
    ----------
    sequence : int
        Number of the request.
    bytes : int
        Device memory that it wants in all.
    """

    sequence: int
    bytes: int


class SharedPages:
    """The pages of one session, read and written by the agent.

    Parameters
    ----------
    memory : SessionMemory
    device : Device
    """

    def __init__(self, memory: SessionMemory, device: Device) -> None:
        self.memory = memory
        #: True if they are unmapped.
        self.closed = False
        #: Bytes that its user's policy allows.
        self.quota = math.inf
        self.settle_on(device)

    def settle_on(self, device: Device) -> None:
        """Publish which device the session is on; there is no worker on another one."""
        self.device = device
        page = self.memory.agent
        page.device_kind = device.kind
        page.device_name = device.name
        page.capability, page.processors = device.capability, device.processors
        page.threads = device.threads
        page.memory_total = page.memory_free = self.memory_limit
        page.memory_quota = self.memory_limit if self.memory_limit < device.memory_total else 0

    @property
    def memory_limit(self) -> int:
        """Bytes of its device that the session may use, if no other session uses any."""
        return int(min(self.quota, self.device.memory_total))

    def limit_memory(self, quota: float) -> None:
        """Limit the session to so many bytes from now on; `math.inf`: only by its device.

        It keeps what it has beyond the limit, and is only refused more.
        """
        if quota != self.quota:
            self.quota = quota
            self.settle_on(self.device)
            self.memory.agent.ring()

    # ---------------------------------------------------------------- reading the pages

    @property
    def drained(self) -> bool:
        """True if everything in the log was executed."""
        return self.memory.worker.consumed >= self.memory.client.head

    @property
    def wants_memory(self) -> bool:
        """True if the client waits for the answer to a request for memory."""
        return self.memory_request is not None

    @property
    def memory_request(self) -> MemoryRequest | None:
        """The client's unanswered request for memory; None if there is none."""
        # In this order: a client writes what it wants before the sequence that announces it.
        sequence = self.memory.client.want_sequence
        if sequence == self.memory.agent.grant_sequence:
            return None
        return MemoryRequest(sequence, self.memory.client.memory_wanted)

    @property
    def idle(self) -> bool:
        """True if no cell runs and nothing is left to execute or to answer."""
        return self.rests_but_for_cells(0)

    def rests_but_for_cells(self, count: int) -> bool:
        """Return True if at most `count` cells run, and nothing is left to execute or to answer."""
        running = self.memory.client.cells_running
        return running <= count and self.drained and not self.wants_memory

    @property
    def awaited(self) -> bool:
        """True if the client cannot continue without a worker.

        It waits for an answer, for room in the log, or until more of the log is executed.
        """
        client, agent = self.memory.client, self.memory.agent
        over_budget = client.head - agent.retained > agent.log_budget
        wanted = max(client.answer_wanted, client.progress_wanted)
        return wanted > self.memory.worker.consumed or over_budget

    def inexact_since(self, position: int) -> float | None:
        """Return since when a recovery would be approximate, which starts at `position`.

        A time of the monotonic clock; None if it would be exact. See Note [Exactness] in
        `native/worker/state/exactness.h`.
        """
        page = self.memory.worker
        found = page.inexact_ns if position >= page.frozen else page.older_inexact_ns
        return found / 1e9 if found else None

    @property
    def recovered_since(self) -> float | None:
        """Since when its state is approximate, after a recovery; None if it is exact."""
        found = self.memory.worker.recovered_ns
        return found / 1e9 if found else None

    def forget_exactness(self) -> None:
        """Forget these times: they are of another clock. There is no worker."""
        page = self.memory.worker
        page.answered_ns = page.inexact_ns = page.recovered_ns = 0
        page.older_answered_ns = page.older_inexact_ns = 0

    @property
    def active_ns(self) -> int:
        """CLOCK_MONOTONIC, in ns, of the last sign of use."""
        return max(self.memory.client.cell_changed_ns, self.memory.worker.active_ns)

    @property
    def log_bytes(self) -> int:
        """Bytes of the log since the newest snapshot."""
        return self.memory.client.head - self.memory.agent.retained

    @property
    def executed_bytes(self) -> int:
        """Bytes of that log that were executed."""
        return self.memory.worker.consumed - self.memory.agent.retained

    @property
    def dirty_bytes(self) -> int:
        """Bytes of the device's state that the newest snapshot does not have."""
        return self.memory.worker.dirty_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that log and snapshots use."""
        return 0 if self.closed else self.memory.host_bytes()

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory that the worker has taken."""
        return self.memory.worker.memory_resident

    @property
    def busy_seconds(self) -> float:
        """Seconds for which all its workers together have executed."""
        return self.memory.worker.busy_ns / 1e9

    # ---------------------------------------------------------------- writing the agent's page

    def announce(self, presence: Presence, reason: str = "") -> None:
        """Publish whether there is a worker. Later reads see what the client wrote before that."""
        page = self.memory.agent
        page.reason = reason
        page.presence = presence
        page.ring()

    def cut_grant(self, grant: int) -> int:
        """Lower the grant, though not below what is in use by now; return the new one.

        The client takes memory without asking: it writes what it uses, and then reads its grant
        again. The agent writes the grant, and then reads what is used. So at least one of them
        notices a conflict.
        """
        page, before = self.memory.agent, self.memory.agent.memory_granted
        # A worker that lags behind needs the grant from the time when its records were appended.
        if grant >= before or not self.drained:
            return before
        page.memory_granted = grant
        page.ring()
        used = self.memory.client.memory_used
        if used > grant:
            grant = min(before, used)
            page.memory_granted = grant
            page.ring()
        return grant
