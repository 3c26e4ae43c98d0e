"""Timeline of devices: computes which session had a device when, from recorded changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kernelproxy.agent.session.states import TRAITS, State

#: States in which a session is on its device, with their ranks.
_RANK = {str(each): TRAITS[each].occupies for each in State if TRAITS[each].occupies}
#: These states in ascending order of importance.
HELD = tuple(sorted(_RANK, key=_RANK.__getitem__))
QUEUED = str(State.QUEUED)

Step = tuple[float, int]


class Change(NamedTuple):
    """A session's change to a state, at a time.

    Parameters
    ----------
    at : float
        Seconds of the epoch.
    session, device : str
        Ids.
    state : str
        One of `HELD`, ``queued``, or something else: then it is on no device.
    """

    at: float
    session: str
    device: str
    state: str


class Span(NamedTuple):
    """A period in which a session was on a device, in one state.

    Parameters
    ----------
    start, end : float
        Seconds of the epoch.
    seconds : float
        How long it was in that state; less than `end` - `start` if several periods were merged.
    """

    session: str
    device: str
    state: str
    start: float
    end: float
    seconds: float


class Timeline:
    """The changes of all sessions in a period.

    Parameters
    ----------
    changes : iterable of Change
        In the order in which they happened, even if the clock was set meanwhile.
    since, until : float
        The period; what is outside is cut off. The last state before it is valid at `since`.
    """

    def __init__(self, changes: Iterable[Change], since: float, until: float) -> None:
        self._since, self._until = since, until
        self._sessions: dict[str, list[Change]] = {}
        for each in changes:
            mine = self._sessions.setdefault(each.session, [])
            # No change is earlier than the one before it.
            mine.append(each._replace(at=mine[-1].at) if mine and mine[-1].at > each.at else each)

    def spans(self) -> list[Span]:
        """Return the periods of sessions on devices, by their start.

        Those of one session do not overlap, and none is empty.
        """
        found: list[Span] = []
        for changes in self._sessions.values():
            ends = [*(each.at for each in changes[1:]), self._until]
            for (at, session, device, state), over in zip(changes, ends, strict=True):
                start, end = max(at, self._since), min(over, self._until)
                if state in _RANK and start < end:
                    found.append(Span(session, device, state, start, end, end - start))
        return _ordered(found)

    def queues(self) -> dict[str, list[Step]]:
        """Return the number of waiting sessions over time, by device."""
        moves: dict[str, list[Step]] = {}
        for changes in self._sessions.values():
            waited = ""
            for at, _, device, state in changes:
                waits = device if state == QUEUED else ""
                if waits != waited:
                    if waited:
                        moves.setdefault(waited, []).append((at, -1))
                    if waits:
                        moves.setdefault(waits, []).append((at, 1))
                waited = waits
        return {device: self._counted(found) for device, found in moves.items()}

    def _counted(self, moves: list[Step]) -> list[Step]:
        steps, count = [], 0
        for at, by in sorted(moves, key=lambda move: move[0]):
            count += by
            steps.append((at, count))
        return cut(steps, self._since, self._until)


def coarser(spans: Iterable[Span], resolution: float) -> list[Span]:
    """Merge many spans into few.

    Parameters
    ----------
    spans : iterable of Span
        By their start.
    resolution : float
        Seconds. Shorter spans are merged with their neighbours: a short rest with the work before
        it, and two spans of one state with the short one between them.
    """
    found: dict[str, list[Span]] = {}
    for each in spans:
        _add(found.setdefault(each.session, []), each, resolution)
    return _ordered([each for mine in found.values() for each in mine])


def _ordered(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda each: (each.start, each.session))


def _add(merged: list[Span], span: Span, resolution: float) -> None:
    """Append a span to those of its session, or merge it with the last one."""
    last = merged[-1] if merged else None
    if last is None or last.device != span.device or span.start - last.end > resolution:
        merged.append(span)
        return
    adjoins, short = span.start == last.end, span.end - span.start < resolution
    less = _RANK[span.state] < _RANK[last.state]
    if span.state == last.state:
        merged[-1] = last._replace(end=span.end, seconds=last.seconds + span.seconds)
    elif adjoins and short and less:
        merged[-1] = last._replace(end=span.end)
    elif adjoins and not less and last.end - last.start < resolution:
        merged.pop()
        # Now it may have to be merged with the span before that.
        _add(merged, span._replace(start=last.start), resolution)
    else:
        merged.append(span)


def cut(steps: Sequence[Step], since: float, until: float) -> list[Step]:
    """Keep the steps of a period; the last value before it is valid at its start."""
    before = [value for at, value in steps if at <= since]
    inside = [each for each in steps if since < each[0] <= until]
    return [(since, before[-1] if before else 0), *inside]


def merged(steps: Sequence[Step], resolution: float) -> list[Step]:
    """Merge many steps into few.

    Parameters
    ----------
    steps : sequence of tuple
        Time, and the value from then on.
    resolution : float
        Seconds. Of steps that are closer together, the highest value stands for all, and the last
        value is valid afterwards: no peak is lost.
    """
    found: list[Step] = []
    index = 0
    while index < len(steps):
        first = steps[index][0]
        end = index + 1
        while end < len(steps) and steps[end][0] - first < resolution:
            end += 1
        group = steps[index:end]
        found.append((first, max(value for _, value in group)))
        found.append(group[-1])
        index = end
    return [
        each for index, each in enumerate(found) if index == 0 or (each[1] != found[index - 1][1])
    ]
