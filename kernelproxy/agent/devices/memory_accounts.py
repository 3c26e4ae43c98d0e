"""Accounts of a GPU's memory: what each worker takes beside its storages, and what others take.

Pure: the driver's report and the workers' own figures go in. Its report is not always complete. In
a container the driver may list processes by ids that they have outside of it, or list none, and it
may keep back how much one uses. Then the worker is charged an estimate: what workers measured
before on that device have taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from kernelproxy.devices.memory_meter import MemorySample

#: Bytes of a context with the libraries that every worker loads, before one was measured.
CONTEXT_BYTES = 512 << 20
#: An estimate is the largest context of so many workers.
_LEARNT_MAX = 8


@dataclass(frozen=True)
class WorkerMemory:
    """A worker's own figures.

    Parameters
    ----------
    pids : frozenset of int
        Its process, and others of its session that may have the device open.
    storages : int
        Bytes that its storages take.
    granted : int
        Bytes that they may take.
    """

    pids: frozenset[int]
    storages: int
    granted: int


@dataclass(frozen=True)
class WorkerAccount:
    """Memory that a worker takes beside its storages, in bytes.

    Parameters
    ----------
    beside : int
        In all.
    context : int
        Of that, what it needs as long as it lives.
    cached : int
        What it has taken beyond its grant and its context: it could give that back.
    measured : bool
        False if it is estimated.
    """

    beside: int
    context: int
    cached: int = 0
    measured: bool = True

    @property
    def charge(self) -> int:
        """Bytes that no grant covers; see Note [Charges] in `memory_grants`."""
        return self.context + self.cached


@dataclass
class MemoryAccounts:
    """Accounts of one device.

    Attributes
    ----------
    workers : dict of str to WorkerAccount
        By session.
    outside : int
        Bytes in use that belong to no worker, with what the driver keeps for itself.
    others : dict of int to int or None
        Bytes of the processes that are no workers, by process id, as far as the driver tells.
    complete : bool
        True if the driver tells which processes use the device.
    """

    workers: dict[str, WorkerAccount] = field(default_factory=dict)
    outside: int = 0
    others: dict[int, int | None] = field(default_factory=dict)
    complete: bool = True
    _stale: set[str] = field(default_factory=set)
    _learnt: deque[int] = field(default_factory=lambda: deque(maxlen=_LEARNT_MAX))

    @property
    def estimate(self) -> int:
        """Bytes that a worker is expected to take beside its storages when it has started."""
        return max(self._learnt, default=CONTEXT_BYTES)

    def take(
        self,
        sample: MemorySample,
        workers: Mapping[str, WorkerMemory],
        elsewhere: Set[int] = frozenset(),
        changed: Collection[str] = (),
    ) -> None:
        """Bring the accounts up to date.

        Parameters
        ----------
        sample : MemorySample
        workers : mapping of str to WorkerMemory
            All workers of this device, by session.
        elsewhere : set of int
            Processes of sessions on other devices; one that migrates has a worker on two.
        changed : collection of str
            Those of `workers` whose figures changed while the driver was asked. Their accounts
            stay, if there are any.
        """
        ours = {pid for each in workers.values() for pid in each.pids} | elsewhere
        # A process without storages may have no context yet; one with storages has.
        self.complete = not any(
            each.storages and not each.pids & sample.processes.keys() for each in workers.values()
        )
        known, self.workers, self._stale = self.workers, {}, set()
        for name, worker in workers.items():
            account = known.get(name)
            if account is None or name not in changed:
                account = self._account(sample, worker, account)
            else:
                self._stale.add(name)
            self.workers[name] = account
        taken = sum(w.storages + self.workers[name].beside for name, w in workers.items())
        taken += sum(sample.processes.get(pid) or 0 for pid in elsewhere)
        self.outside = max(0, sample.used - taken)
        self.others = {p: count for p, count in sample.processes.items() if p not in ours}
        if not self.complete:
            self.others = {}  # some of them may be workers

    def gave_back(self, session: str, worker: WorkerMemory, kept: int) -> None:
        """Note that a worker has no cache but `kept` bytes: what else it takes is its context.

        Parts of blocks that are in use cannot be given back. They are no part of its context: that
        would be expected of the next worker, too, and never be granted.
        """
        if not (account := self.workers.get(session)) or not account.measured:
            return
        if session in self._stale:  # its storages change all the time
            self.workers[session] = _divided(account.context + kept, account.context, worker)
            return
        context = max(0, account.beside - kept)
        self.workers[session] = _divided(account.beside, context, worker)
        self._learnt.append(context)

    def forget(self, session: str) -> None:
        """Note that a session has no worker here any more."""
        self.workers.pop(session, None)

    def _account(
        self, sample: MemorySample, worker: WorkerMemory, known: WorkerAccount | None
    ) -> WorkerAccount:
        found = [sample.processes[pid] for pid in worker.pids if pid in sample.processes]
        used = [count for count in found if count is not None]
        if not used or len(used) < len(found) or sum(used) < worker.storages:
            if known is not None and known.measured:
                return known
            return WorkerAccount(self.estimate, self.estimate, measured=False)
        beside = sum(used) - worker.storages
        if known is not None and known.measured:
            context = min(known.context, beside)
        else:  # it may have a cache already
            context = min(self.estimate, beside)
            self._learnt.append(context)
        return _divided(beside, context, worker)


def _divided(beside: int, context: int, worker: WorkerMemory) -> WorkerAccount:
    spare = max(0, worker.granted - worker.storages)
    return WorkerAccount(beside, context, max(0, beside - context - spare))
