"""Forecast of when a lease gives way: predicts `Running.may_preempt`.

That rule says whether a session may be stopped now. Its conditions change in ways that are known in
advance: protection and quanta end, cells sink by the service that they get, waiting sessions rise.
So the first moment at which it will hold can be computed. The remaining duration of a cell is
unknown, and estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jupyter_sing.scheduler.fairness.fair_queue import Flow
from jupyter_sing.scheduler.fairness.mlfq import level_of
from jupyter_sing.scheduler.queue.wait_queue import INTERACTIVE
from jupyter_sing.scheduler.settings import EngineSettings, Tier
from jupyter_sing.scheduler.state import EngineSession


@dataclass(slots=True)
class ExpectedLease:
    """A present or expected lease.

    Attributes
    ----------
    session
        Holder of the lease.
    start, attained
        When it begins to execute, or did, and what its cell had attained by then.
    protected, exposed, expires, held
        When it may be preempted at all; by premium sessions; by its equals; by any session.
    urgent_until
        Until when its tier puts it before others.
    throttled
        Whether its user or cluster had so much service that all others go first.
    end
        When its cell is likely to finish.
    """

    session: EngineSession
    start: float
    attained: float
    protected: float
    exposed: float
    expires: float
    held: float
    urgent_until: float
    throttled: bool
    end: float

    def attained_at(self, at: float) -> float:
        """Return the seconds that its cell will have attained."""
        return self.attained + max(0.0, at - self.start)

    def sinks(self, level: int, settings: EngineSettings) -> float:
        """Return when its cell sinks to a level; `math.inf`: never."""
        if level == 0:
            return -math.inf
        if level > len(settings.levels):
            return math.inf
        return self.start + settings.levels[level - 1] - self.attained


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """Request of a waiting session.

    Attributes
    ----------
    attained
        What its cell has attained.
    levels
        Its level, and those to which it rises by waiting, each with the time at which it begins.
    urgent_at
        When its tier, or how long it has waited, puts it before others.
    throttled
        As in `ExpectedLease`.
    """

    session: EngineSession
    attained: float
    levels: tuple[tuple[int, float], ...]
    urgent_at: float
    throttled: bool


def gives_way(
    turn: ExpectedLease, request: WaitingRequest, settings: EngineSettings, now: float
) -> float:
    """Return when a lease is likely to end, be it only for the sake of a waiting session."""
    victim, waiting = turn.session, request.session
    if not victim.terms.may_preempt or victim.lease.right not in ("", waiting.vc):
        return max(now, turn.end)
    when = max(turn.protected, min(turn.held, *_comes_first(turn, request, settings, now)))
    interactive = request.levels[0][0] <= INTERACTIVE
    interactive = interactive and (request.urgent_at <= now or not request.throttled)
    if interactive and waiting.terms.tier is Tier.PREMIUM and victim.terms.tier is Tier.BASIC:
        when = min(when, turn.exposed)
    return max(now, min(when, turn.end))


def _comes_first(
    turn: ExpectedLease, request: WaitingRequest, settings: EngineSettings, now: float
) -> Iterator[float]:
    """Yield the times from which a waiting session precedes an executing one, one per reason."""
    yield max(request.urgent_at, turn.urgent_until)
    alike = min(request.urgent_at, turn.urgent_until)  # until both are urgent, or neither is
    if turn.urgent_until <= request.urgent_at and turn.throttled != request.throttled:
        if turn.throttled:
            yield max(alike, turn.expires)
        return
    present = level_of(turn.attained_at(now), settings)
    owed = _owed_more(request.session.flow, turn.session.flow, now)
    for level, since in request.levels:
        yield max(alike, since, turn.sinks(level + 1, settings))
        equal = turn.sinks(level, settings)
        expires = equal + settings.quanta[level] if level > present else turn.expires
        yield max(alike, since, equal, expires, owed)


def _owed_more(mine: Flow, theirs: Flow, now: float) -> float:
    """Return when fairness puts the first before the other, if the other executes all the time."""
    while mine.parent is not theirs.parent:
        assert mine.parent
        assert theirs.parent
        mine, theirs = mine.parent, theirs.parent
    return now + max(0.0, mine.at(now) - theirs.at(now)) * theirs.weight
