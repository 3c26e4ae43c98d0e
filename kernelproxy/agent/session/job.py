"""The job of a session: of which program, in several processes, its process is one rank."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from kernelproxy.agent.session.core import SessionCore
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import RANKS_MAX
from kernelproxy.common.scheduler_api import Arbiter

_ID = re.compile(r"[A-Za-z0-9_.:/@+-]{1,128}")


@dataclass(frozen=True)
class JobRank:
    """A rank's place in its job.

    Parameters
    ----------
    id : str
        Token of the job; only its user's other jobs have different ones.
    rank, size : int
        Number of the rank, and of all ranks.
    """

    id: str
    rank: int
    size: int

    def check(self) -> None:
        """Raise ControlError if these are not the values of a rank."""
        if not _ID.fullmatch(self.id):
            raise ControlError(
                "The id of a job has 1 to 128 letters, digits or characters of _.:/@+-.",
                "bad-request",
            )
        if not 0 <= self.rank < self.size <= RANKS_MAX:
            raise ControlError(
                f"Rank {self.rank} of {self.size} is none: a job has 1 to {RANKS_MAX} ranks, "
                "numbered from 0.",
                "bad-request",
            )


class JobMembership:
    """The job of one session, as its process reports it.

    Parameters
    ----------
    core : SessionCore
    arbiter : Arbiter
    """

    def __init__(self, core: SessionCore, arbiter: Arbiter) -> None:
        #: None: it is in no job.
        self.job: JobRank | None = None
        self._core, self._arbiter = core, arbiter

    def join(self, job: JobRank) -> None:
        """Make the session a rank of a job, in place of any earlier one. Idempotent.

        Raises
        ------
        ControlError
            If the values are not those of a rank, or the session has ended.
        """
        self._core.check_usable()
        job.check()
        if job == self.job:
            return
        self.job = job
        self._core.persist()
        self._core.changed()
        self._report(job)
        self._core.request_reconcile()

    def _report(self, job: JobRank) -> None:
        # Two users may have chosen the same token, and must not be scheduled together.
        self._arbiter.joined(self._core.id, f"{self._core.owner}:{job.id}", job.rank, job.size)

    def record(self) -> dict[str, Any] | None:
        """Return what `recover` needs, as JSON."""
        return asdict(self.job) if self.job is not None else None

    def recover(self, record: dict[str, Any] | None) -> None:
        """Recover from the record of an agent that died."""
        if record is not None:
            self.job = JobRank(**record)
            self._report(self.job)
