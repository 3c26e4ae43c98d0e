"""Jobs of several ranks: which sessions belong together, and when they are a gang."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jupyter_sing.controller.decision_runner import DecisionRunner
from jupyter_sing.controller.jobs.gang_leases import GangLeases
from jupyter_sing.controller.jobs.job import GangJob, JobState, job_id
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.controller.time_to_gpu import TimeToGpu
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.events import Event
from kernelproxy.common.errors import ControlError


class Jobs:
    """All jobs.

    Parameters
    ----------
    sessions : mapping of str to SessionEntry
        All sessions, by id.
    leases : GangLeases
    runner : DecisionRunner
    waits : TimeToGpu
    send : callable
        Sends an event to the engine.
    add : callable
        Adds a session to the engine, as one of its own.
    clock : callable
        Seconds.
    """

    device_count: int

    def __init__(
        self,
        sessions: Mapping[str, SessionEntry],
        leases: GangLeases,
        runner: DecisionRunner,
        waits: TimeToGpu,
        send: Callable[[Event], None],
        add: Callable[[SessionEntry], None],
        clock: Callable[[], float],
    ) -> None:
        self._sessions, self._leases, self._runner, self._waits = sessions, leases, runner, waits
        leases.absorbed, leases.parted = self._absorbed, self._parted
        self._send, self._add, self._clock = send, add, clock
        self._jobs: dict[str, GangJob] = {}
        self._of: dict[str, GangJob] = {}  # by session
        # Sessions that have joined a job before they were opened, or while they are in another one.
        self._early: dict[str, tuple[str, int, int]] = {}

    # ---------------------------------------------------------------- which session is a rank

    def of(self, session: str) -> GangJob | None:
        """Return the job that a session is executed with; None: it is scheduled on its own."""
        job = self._of.get(session)
        return None if job is None or job.state is JobState.APART else job

    def by_id(self, name: str) -> GangJob | None:
        """Return a job by its name in the engine."""
        return self._jobs.get(name)

    def leader_of(self, name: str) -> SessionEntry | None:
        """Return the rank of which the terms are those of a job."""
        job = self._jobs.get(name)
        return None if job is None else self._sessions[job.leader]

    def known_as(self, session: str) -> str | None:
        """Return the name by which the engine knows a session; None: only as a part of a job."""
        job = self.of(session)
        if job is None or session in job.awaited:
            return session
        return job.id if session == job.leader and job.state is not JobState.JOINING else None

    def held(self) -> dict[str, tuple[str, int]]:
        """Return the device and the token of the lease of every rank of a gang."""
        ranks = [self._sessions[each] for job in self._jobs.values() if job.lease
                 for each in job.ranks]  # fmt: skip
        return {e.terms.session: (e.granted, e.token) for e in ranks if e.token is not None}

    def devices_of(self, session: str, *, held: bool) -> int:
        """Return how many devices count for a session: all those of a job for one of its ranks."""
        job = self.of(session)
        if job is None or job.lease is None:
            return int(held)
        return len(job.lease.devices) if session == job.leader else 0

    # ---------------------------------------------------------------- joining and parting

    def joined(self, session: str, job: str, rank: int, size: int) -> None:
        """See `Arbiter`."""
        if not 0 <= rank < size:
            raise ControlError(f"A job of {size} ranks has no rank {rank}.", "bad-request")
        known = self._sessions.get(session)
        if known is None:
            self._early[session] = (job, rank, size)
            return
        name, user = job_id(known.terms.user, job), known.terms.user
        before = self._of.get(session)
        if before is not None and before.id != name:
            if before.state is not JobState.APART:
                self._early[session] = (job, rank, size)
                if before.state is JobState.TOGETHER:
                    self._part(before)
                return
            self._forget(before, session)
        found = self._jobs.setdefault(name, GangJob(name, user, size))
        is_new = found.ranks.get(session) != rank or found.size != size
        found.ranks[session], found.size, self._of[session] = rank, size, found
        if not is_new:
            return
        if found.state is JobState.TOGETHER and before is not found:
            self._absorb(found, session)
        elif found.state is JobState.TOGETHER:
            self._part(found)  # it is another job, or has other ranks, now
        self.review(session)

    def opened(self, session: str) -> None:
        """Let a session that could not join a job before join it now."""
        if session in self._early:
            self.joined(session, *self._early.pop(session))

    def review(self, session: str) -> None:
        """Join or part the ranks of the job of a session, after a change of its terms."""
        job = self._of.get(session)
        if job is None:
            return
        if job.state is JobState.APART and job.is_complete and self._may_move(job):
            if job.size > 1:
                job.state = JobState.JOINING
                for each in list(job.ranks):
                    self._absorb(job, each)
                self._settle(job)
        elif job.state is JobState.TOGETHER and not self._may_move(job):
            self._part(job)

    def _may_move(self, job: GangJob) -> bool:
        """True if none of its ranks has to stay where it is, or joins another job."""
        terms = [self._sessions[each].terms for each in job.ranks]
        return not any(t.pinned or t.bound or t.session in self._early for t in terms)

    def _absorb(self, job: GangJob, session: str) -> None:
        """Take a rank out of the engine, as soon as it has no lease of its own."""
        known = self._sessions[session]
        if known.token is None:
            self._send(events.SessionRemoved(self._clock(), session))
            self._leases.locate(job)
            self._leases.wanted(job, session)
            return
        job.awaited[session] = None
        self._runner.actions.preempt(session, known.token)

    def granted(self, session: str, token: int) -> None:
        """Stop a rank that is awaited, and was granted a device once more before it stopped."""
        job = self._of.get(session)
        if job is not None and session in job.awaited:
            self._runner.actions.preempt(session, token)

    def _absorbed(self, job: GangJob, session: str) -> None:
        """Take out a rank that has stopped."""
        del job.awaited[session]
        self._send(events.SessionRemoved(self._clock(), session))
        if job.state is JobState.JOINING:
            self._settle(job)
        else:
            self._leases.locate(job)
            self._leases.wanted(job, session)

    def _settle(self, job: GangJob) -> None:
        """Let a job begin as a gang when its ranks have stopped; one may have left meanwhile."""
        if job.awaited or job.state is not JobState.JOINING:
            return
        if not job.is_complete or not self._may_move(job):
            self._separate(job)
            return
        job.state = JobState.TOGETHER
        standing, now = self._sessions[job.leader].standing, self._clock()
        self._send(
            events.SessionAdded(
                now, job.id, standing.vc, job.user, standing.tier,
                gpus=min(job.size, self.device_count), gpus_min=1, ranks=job.size,
                memory=self._leases.rank_memory(job), resident=False,
            )
        )  # fmt: skip
        self._leases.locate(job)
        if any(self._sessions[each].wants for each in job.ranks):
            self._leases.submit(job)

    def _part(self, job: GangJob) -> None:
        """Let the engine know the ranks as sessions again, once they have stopped."""
        job.state = JobState.PARTING
        if job.lease is None:
            self._parted(job)
        elif not job.lease.stopping:
            self._leases.stop(job, job.lease)

    def _parted(self, job: GangJob) -> None:
        self._waits.forget(job.id)
        self._send(events.SessionRemoved(self._clock(), job.id))
        self._separate(job)
        for each in list(job.ranks)[:1]:
            self.review(each)

    def _separate(self, job: GangJob) -> None:
        job.state, job.submitted, job.places = JobState.APART, False, None
        job.evicting.clear()
        for each in job.ranks:
            if each in job.awaited:
                continue  # it has never been taken out
            known = self._sessions[each]
            self._add(known)
            self._runner.actions.describe(each, "")
            if known.wants:
                self._send(events.CellSubmitted(self._clock(), each))
        job.awaited.clear()
        for each in list(job.ranks):
            self.opened(each)

    def _forget(self, job: GangJob, session: str) -> None:
        del job.ranks[session], self._of[session]
        if not job.ranks:
            del self._jobs[job.id]

    def closed(self, session: str) -> bool:
        """Forget a rank that has ended; the others continue, and the launcher may end them.

        Returns
        -------
        bool
            False if the engine knows it as a session.
        """
        self._early.pop(session, None)
        job = self._of.pop(session, None)
        if job is None:
            return False
        is_known = job.state is JobState.APART or session in job.awaited
        job.awaited.pop(session, None)
        del job.ranks[session]
        for device in list(job.evicting):
            self._leases.settle_eviction(job, session, device, "")
        if not job.ranks:
            del self._jobs[job.id]
            if job.state not in (JobState.APART, JobState.JOINING):
                self._waits.forget(job.id)
                self._send(events.SessionRemoved(self._clock(), job.id))
        elif job.state is JobState.JOINING:
            self._settle(job)
        elif job.state is not JobState.APART:
            self._leases.locate(job)
            self._leases.after(job)
        return not is_known
