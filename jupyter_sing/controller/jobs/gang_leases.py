"""Leases of gangs: the engine grants devices to a gang, and the agent executes a session per rank.

A gang holds devices, and its ranks have leases there, each one while it has something to execute.
The engine's decisions about a gang are carried out rank by rank, and answered when all ranks have
answered: so either all ranks of a job may execute, or none. A rank that rests, or of which the
worker dies, while the gang has its devices gets its next lease at once, without the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from jupyter_sing.controller.decision_runner import DecisionRunner
from jupyter_sing.controller.jobs.job import GangJob, JobLease, JobState, first_to_move, seating
from jupyter_sing.controller.session_entry import SessionEntry
from jupyter_sing.controller.time_to_gpu import TimeToGpu
from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import (
    Decision,
    Evict,
    Grant,
    GuaranteeChanged,
    Preempt,
    PrepareResize,
    Queued,
)
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.events import Event
from kernelproxy.common.readable import device_name


class GangLeases:
    """Leases of all gangs.

    Parameters
    ----------
    sessions : mapping of str to SessionEntry
        All sessions, by id.
    runner : DecisionRunner
    waits : TimeToGpu
    send : callable
        Sends an event to the engine.
    clock : callable
        Seconds.

    Attributes
    ----------
    absorbed
        Called with a job and a rank that has stopped, which the engine knew as a session.
    parted
        Called with a job that has stopped so that the engine knows its ranks as sessions.
    """

    engine: Engine
    absorbed: Callable[[GangJob, str], None]
    parted: Callable[[GangJob], None]

    def __init__(
        self,
        sessions: Mapping[str, SessionEntry],
        runner: DecisionRunner,
        waits: TimeToGpu,
        send: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._sessions, self._runner, self._waits = sessions, runner, waits
        self._send, self._clock = send, clock

    # ---------------------------------------------------------------- calls of the agent

    def wants(self, job: GangJob, session: str) -> None:
        """A rank has something to execute."""
        self._sessions[session].wants = True
        self.wanted(job, session)

    def wanted(self, job: GangJob, session: str) -> None:
        if job.state in (JobState.JOINING, JobState.APART) or session in job.awaited:
            return
        known, lease = self._sessions[session], job.lease
        if not known.wants or known.token is not None:
            return
        if lease is not None and not lease.stopping:
            self._give(job, session, self.engine.new_token())
        elif not job.submitted:
            self.submit(job)

    def submit(self, job: GangJob) -> None:
        job.submitted = True
        self._waits.begin(job.id, self._clock())
        self._send(events.CellSubmitted(self._clock(), job.id))

    def started(self, job: GangJob, session: str, token: int) -> None:
        """A rank has begun to execute."""
        known = self._sessions[session]
        if known.token != token or job.lease is None or session in job.awaited:
            return
        known.device, known.resident = known.granted, True
        job.lease.started.add(session)
        self.locate(job)
        self._announce(job)

    def released(self, job: GangJob, session: str, token: int) -> None:
        """A rank has stopped; if it was still being loaded, that completes in the background."""
        known = self._sessions[session]
        if known.token == token:
            known.device, known.resident = known.granted, True
            self.locate(job)
        self.ended(job, session, token, wants=known.wants)

    def ended(self, job: GangJob, session: str, token: int | None, *, wants: bool) -> None:
        """The lease of a rank is over: of this token, if it is one."""
        known = self._sessions[session]
        known.wants = wants
        if token is not None and token != known.token:
            return
        known.token = None
        if session in job.awaited:
            self.absorbed(job, session)
            return
        if job.lease is not None:
            job.lease.started.discard(session)
        self.after(job)
        self.wanted(job, session)

    def refused(self, job: GangJob, session: str, token: int, why: str) -> None:
        """A rank could not use its lease: all others stop, too, and the engine tries again."""
        known, lease = self._sessions[session], job.lease
        if known.token != token or lease is None or lease.stopping or session in job.awaited:
            self.ended(job, session, token, wants=known.wants)
            return
        known.token = None
        lease.refusal = why
        self.stop(job, lease)

    def moved(self, job: GangJob, session: str, device: str, *, resident: bool) -> None:
        """A rank belongs to another device now. If its user did that, it returns to its seat."""
        known = self._sessions[session]
        known.device, known.resident = device, resident
        self.locate(job)
        if known.token is not None and device != known.granted:
            self.ended(job, session, known.token, wants=True)

    def evicted(self, job: GangJob, session: str, device: str) -> None:
        """A rank has no memory on its device any more."""
        self._sessions[session].resident = False
        self.locate(job)
        self.settle_eviction(job, session, device, "")

    def stayed(self, job: GangJob, session: str, device: str, why: str) -> None:
        """A rank could not be evicted."""
        self.settle_eviction(job, session, device, why)

    def settle_eviction(self, job: GangJob, session: str, device: str, why: str) -> None:
        pending = job.evicting.get(device)
        if pending is None or session not in pending:
            return
        del pending[session]
        if pending:
            return
        del job.evicting[device]
        self._answer_eviction(job, device, why)

    def _answer_eviction(self, job: GangJob, device: str, why: str) -> None:
        now = self._clock()
        if self._resident(job, device):
            self._send(events.Stayed(now, job.id, device, why or "One of its ranks is in use."))
        else:
            self._send(events.Evicted(now, job.id, device))

    def measured(self, job: GangJob, seconds: float, step_seconds: float | None) -> None:
        """A rank was measured; the engine counts as many bytes for each rank as the largest has."""
        memory = self.rank_memory(job)
        if job.state is JobState.TOGETHER:
            now = self._clock()
            self._send(events.Measured(now, job.id, memory, seconds, step_seconds))
            self.locate(job)

    def rank_memory(self, job: GangJob) -> int:
        return max(self._sessions[each].memory for each in job.ranks)

    # ---------------------------------------------------------------- answers to the engine

    def _announce(self, job: GangJob) -> None:
        """Report that the gang executes, when all ranks that have a lease do."""
        lease = job.lease
        if lease is None or lease.announced or job.state is not JobState.TOGETHER:
            return
        holding = {each for each in job.ranks if self._sessions[each].token is not None}
        if holding and holding <= lease.started:
            lease.announced = True
            self.locate(job)
            self._waits.end(job.id, self._sessions[job.leader].standing.tier, self._clock())
            self._send(events.Started(self._clock(), job.id, lease.token))

    def after(self, job: GangJob) -> None:
        """Report what follows from the end of a rank's lease."""
        lease = job.lease
        holds = any(self._sessions[each].token is not None for each in job.ranks)
        wants = any(self._sessions[each].wants for each in job.ranks)
        if lease is not None and not holds and (lease.stopping or not wants):
            job.lease = None
            self._over(job, lease, wants=wants)
        elif lease is not None:
            self._announce(job)
        elif job.submitted and not wants:
            self._finish(job)

    def _over(self, job: GangJob, lease: JobLease, *, wants: bool) -> None:
        self.locate(job)
        if job.state is JobState.PARTING:
            self.parted(job)
        elif lease.refusal is not None:
            self._send(events.GrantRefused(self._clock(), job.id, lease.token, lease.refusal))
        elif wants:
            self._send(events.Released(self._clock(), job.id, lease.token))
        if not wants and job.state is JobState.TOGETHER:
            self._finish(job)

    def _finish(self, job: GangJob) -> None:
        job.submitted = False
        self._waits.forget(job.id)
        self._send(events.CellFinished(self._clock(), job.id))

    def _resident(self, job: GangJob, device: str) -> list[str]:
        return [each for each, there in self._where(job).items() if there == device]

    def locate(self, job: GangJob) -> None:
        """Tell the engine where the memory of the ranks is, if that has changed."""
        if job.state is not JobState.TOGETHER:
            return
        size, ranks = self.rank_memory(job), Counter(self._where(job).values())
        places = tuple(sorted((device, size * count) for device, count in ranks.items()))
        if places != job.places:
            job.places = places
            self._send(events.Located(self._clock(), job.id, places))

    # ---------------------------------------------------------------- decisions of the engine

    def carry_out(self, job: GangJob, decision: Decision) -> None:
        """Have the agent act on a decision about a gang, rank by rank, and log it for each."""
        if job.state is JobState.APART:
            return  # it was removed meanwhile
        match decision:
            case Grant():
                self._grant(job, decision)
            case Preempt():
                self._preempt(job, decision)
            case PrepareResize(_, devices):
                for each, device in first_to_move(job, devices, self._where(job)):
                    self._runner.actions.prepare(each, device)
            case Evict(_, device, to):
                where = "host memory" if to == "host" else to
                there = self._resident(job, device)
                why = self._runner.named(decision.reason, job.leader)
                job.evicting[device] = dict.fromkeys(there)
                for each in there:
                    text = f"Its memory goes from {device_name(device)} to {where}: {why}."
                    self._runner.note(each, decision.kind, text)
                    self._runner.actions.evict(each, device, f"{why[:1].upper()}{why[1:]}")
                if not there:
                    del job.evicting[device]
                    self._answer_eviction(job, device, "")
            case Queued():
                self._explain(job, decision.kind)
            case GuaranteeChanged():
                for each in list(job.ranks):
                    self._runner.note_guarantee(each, decision)

    def explain(self, job: GangJob) -> None:
        """Tell the ranks that wait what they can expect."""
        self._explain(job, None)

    def _explain(self, job: GangJob, kind: str | None) -> None:
        outlook = self._runner.outlook(job.id)
        for each in list(job.ranks) if outlook is not None else ():
            if outlook is not None and self._sessions[each].wants:
                self._runner.actions.explain(each, outlook.reason)
                if kind is not None:
                    self._runner.note(each, kind, outlook.reason)

    def _grant(self, job: GangJob, grant: Grant) -> None:
        devices = seating(job.ranks, job.size, grant.devices, self._where(job))
        lease = job.lease = JobLease(grant.token, devices)
        job.places = None  # the engine counts all ranks there, until it is notified
        text = self._runner.named(self.engine.job_text(job.id) or "", job.leader)
        for each in list(job.ranks):
            self._runner.actions.describe(each, f"{text}.")
            if each in job.ranks and job.lease is lease and self._sessions[each].wants:
                why = f"It may use {device_name(job.seat(each))} for {grant.quantum:g} s. {text}."
                self._runner.note(each, grant.kind, why)
                self._give(job, each, grant.token)

    def _give(self, job: GangJob, session: str, token: int) -> None:
        """Give a rank a lease on its seat."""
        assert job.lease is not None
        known = self._sessions[session]
        known.token, known.granted = token, job.seat(session)
        job.lease.started.discard(session)
        self._runner.actions.grant(session, known.granted, token)

    def _preempt(self, job: GangJob, decision: Preempt) -> None:
        lease = job.lease
        if lease is None or lease.token != decision.token:
            return
        kind, why = decision.kind, self._runner.named(decision.reason, job.leader)
        text = f"Its turn ends: {why}."
        if decision.resize:
            kind = "shrink" if decision.resize < len(lease.devices) else "grow"
            text = f"{why}."
        for each in list(job.ranks):
            self._runner.note(each, kind, text)
            if decision.resize:
                self._runner.actions.explain(each, text)
        self.stop(job, lease, decision.at_nadir_within)

    def _where(self, job: GangJob) -> dict[str, str]:
        """Return the device of each rank that is resident."""
        known = ((each, self._sessions[each]) for each in job.ranks)
        return {each: entry.device for each, entry in known if entry.resident}

    def stop(self, job: GangJob, lease: JobLease, within: float = 0.0) -> None:
        """Stop all ranks; a gang that is being stopped already is not stopped again."""
        if lease.stopping:
            return
        lease.stopping = True
        for each in list(job.ranks):
            known = self._sessions.get(each)
            if known is not None and known.token is not None and job.lease is lease:
                self._runner.actions.preempt(each, known.token, within)
        if job.lease is lease:
            self.after(job)
