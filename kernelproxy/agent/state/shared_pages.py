"""What the shared pages of a session say, and what the agent says on its own."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernelproxy.common.shared_memory import Presence, SessionMemory
from kernelproxy.devices import Device


class Wish(NamedTuple):
    """What a client wishes for and waits to be answered.

    Parameters
    ----------
    sequence : int
        Which of its wishes this is.
    bytes : int
        Device memory it wants in all.
    """

    sequence: int
    bytes: int


class Pages:
    """The pages of one session, read and written by the agent.

    Parameters
    ----------
    memory : SessionMemory
    device : Device
    """

    def __init__(self, memory: SessionMemory, device: Device) -> None:
        self.memory = memory
        #: Whether they are gone.
        self.closed = False
        #: Bytes that its user's policy allows.
        self.quota = math.inf
        self.settle_on(device)

    def settle_on(self, device: Device) -> None:
        """Tell the client which device it is on; no worker is on another one."""
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
        """Bytes of its device that the session may use, if nobody else does."""
        return int(min(self.quota, self.device.memory_total))

    def limit_memory(self, quota: float) -> None:
        """Hold the session to so many bytes from now on; `math.inf`: to its device's.

        It keeps what it has beyond that, and is only refused more.
        """
        if quota != self.quota:
            self.quota = quota
            self.settle_on(self.device)
            self.memory.agent.ring()

    # ---------------------------------------------------------------- what the pages say

    @property
    def drained(self) -> bool:
        """Whether everything in the log was executed."""
        return self.memory.worker.consumed >= self.memory.client.head

    @property
    def wants_memory(self) -> bool:
        """Whether the client waits for an answer to its wish for memory."""
        return self.wish is not None

    @property
    def wish(self) -> Wish | None:
        """What the client wishes for, unless that was answered."""
        # In this order: a client writes what it wants before the sequence that announces it.
        sequence = self.memory.client.want_sequence
        if sequence == self.memory.agent.grant_sequence:
            return None
        return Wish(sequence, self.memory.client.memory_wanted)

    @property
    def idle(self) -> bool:
        """Whether no cell runs and nothing is left to execute or to answer."""
        return self.rests_but_for_cells(0)

    def rests_but_for_cells(self, count: int) -> bool:
        """Whether no more cells than that run, and nothing is left to execute or to answer."""
        running = self.memory.client.cells_running
        return running <= count and self.drained and not self.wants_memory

    @property
    def awaited(self) -> bool:
        """Whether the client cannot go on without a worker.

        It waits for an answer, for room in the log, or until more of it was executed.
        """
        client, agent = self.memory.client, self.memory.agent
        over_budget = client.head - agent.retained > agent.log_budget
        wanted = max(client.answer_wanted, client.progress_wanted)
        return wanted > self.memory.worker.consumed or over_budget

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
        """Bytes of host memory that log and snapshots take."""
        return 0 if self.closed else self.memory.host_bytes()

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory that the worker has taken."""
        return self.memory.worker.memory_resident

    @property
    def busy_seconds(self) -> float:
        """Time that all its workers have executed."""
        return self.memory.worker.busy_ns / 1e9

    # ---------------------------------------------------------------- what the agent says

    def announce(self, presence: Presence, reason: str = "") -> None:
        """Tell the client whether there is a worker. Reads after this see what it wrote before."""
        page = self.memory.agent
        page.reason = reason
        page.presence = presence
        page.ring()

    def cut_grant(self, grant: int) -> int:
        """Lower the grant, though not below what is in use by now; return the new one.

        The client takes memory without asking: it notes what it uses and then looks at its grant
        again, we write the grant and then look at what it uses, and so one of both notices.
        """
        page, before = self.memory.agent, self.memory.agent.memory_granted
        # A worker that lags behind needs the grant of when its records were appended.
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
