"""A job of several ranks, as the controller knows it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from jupyter_sing.scheduler.gangs.ranks import seat_of


class JobState(Enum):
    """State of a job.

    APART: the engine knows its ranks as sessions of their own, as not all have joined, or one is
    pinned or bound. JOINING: those that have a lease are being stopped. -> TOGETHER: the engine
    knows it as a gang. PARTING: its ranks are being stopped. -> APART.
    """

    APART = "apart"
    JOINING = "joining"
    TOGETHER = "together"
    PARTING = "parting"


@dataclass(slots=True)
class JobLease:
    """Lease of a gang.

    Parameters
    ----------
    token : int
        Of the engine. The first leases of its ranks have the same one; later ones are higher.
    devices : list of str
        By the place of the interval of ranks that sits there.
    started : set of str
        Ranks that have begun to execute with their present lease.
    announced : bool
        True if the engine knows that it has begun to execute.
    stopping : bool
        True if all of its ranks are being stopped.
    refusal : str, optional
        Why one of them could not use its lease.
    """

    token: int
    devices: list[str]
    started: set[str] = field(default_factory=set)
    announced: bool = False
    stopping: bool = False
    refusal: str | None = None


@dataclass(slots=True)
class GangJob:
    """A job.

    Parameters
    ----------
    id : str
        Its name in the engine: of the same form as those of sessions.
    user : str
    size : int
        Number of its ranks.
    ranks : dict
        Number of each rank, by session.
    awaited : dict
        Ranks that the engine still knows as sessions: they have to stop first.
    lease : JobLease, optional
    submitted : bool
        True if the engine knows that it needs devices.
    evicting : dict
        Ranks that are being evicted from a device, by device.
    places : tuple, optional
        Where the memory of its ranks is, as the engine knows it.
    """

    id: str
    user: str
    size: int
    ranks: dict[str, int] = field(default_factory=dict)
    state: JobState = JobState.APART
    awaited: dict[str, None] = field(default_factory=dict)
    lease: JobLease | None = None
    submitted: bool = False
    evicting: dict[str, dict[str, None]] = field(default_factory=dict)
    places: tuple[tuple[str, int], ...] | None = None

    @property
    def is_complete(self) -> bool:
        """True if each of its ranks has joined, and has not ended."""
        return set(self.ranks.values()) == set(range(self.size))

    def seat(self, session: str) -> str:
        """Return the device of a rank while the job has a lease."""
        assert self.lease is not None
        return self.seat_among(session, self.lease.devices)

    def seat_among(self, session: str, devices: Sequence[str]) -> str:
        """Return the device of a rank among those of all intervals of ranks, in their order."""
        place = seat_of(self.ranks[session], self.size, len(devices))
        return devices[min(place, len(devices) - 1)]

    @property
    def leader(self) -> str:
        """Session of its lowest rank: its terms are those of the job."""
        return min(self.ranks, key=lambda session: (self.ranks[session], session))


def job_id(user: str, job: str) -> str:
    """Return the name of a job in the engine: the same one after a restart."""
    return hashlib.blake2s(f"{user}\0{job}".encode(), digest_size=6).hexdigest()


def seating(
    ranks: Mapping[str, int], size: int, devices: Sequence[str], where: Mapping[str, str]
) -> list[str]:
    """Assign intervals of ranks to devices so that few ranks have to move.

    Parameters
    ----------
    ranks : mapping of str to int
        Number of each rank, by session.
    size : int
        Number of ranks of the job.
    devices : sequence of str
    where : mapping of str to str
        Device of each rank that is resident, by session.

    Returns
    -------
    list of str
        The devices, by the place of their interval; see `gangs.ranks.seat_of` of the scheduler.
    """
    here: Counter[tuple[int, str]] = Counter()
    for session, device in where.items():
        here[seat_of(ranks[session], size, len(devices)), device] += 1
    pairs = sorted(
        (-here[place, device], place, order)
        for place in range(len(devices))
        for order, device in enumerate(devices)
    )
    found: dict[int, str] = {}
    for _, place, order in pairs:
        if place not in found and devices[order] not in found.values():
            found[place] = devices[order]
    return [found[place] for place in range(len(devices))]


def first_to_move(
    job: GangJob, devices: Sequence[str], where: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return the ranks that a resize would bring first to devices without a rank, and these.

    Those that follow them there can share what they have. `where`: see `seating`.
    """
    seats = seating(job.ranks, job.size, devices, where)
    reached, found = set(where.values()), list[tuple[str, str]]()
    for each in job.ranks:
        device = job.seat_among(each, seats)
        if device not in reached:
            reached.add(device)
            found.append((each, device))
    return found
