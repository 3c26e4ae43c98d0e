"""Sessions as a tree: below each the sessions of processes that it started, ranks below their job.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernelproxy.common.protocol.views import SessionView


@dataclass(frozen=True)
class JobRow:
    """A job of several ranks, above their rows.

    Parameters
    ----------
    depth : int
        Number of rows above it that it belongs to.
    ranks : sequence of SessionView
        Sessions of its ranks, by rank; some may have none yet, or not any more.
    """

    depth: int
    ranks: Sequence[SessionView]

    @property
    def name(self) -> str:
        """Name of the program."""
        return re.sub(r" rank \d+$", "", self.ranks[0]["name"])

    @property
    def text(self) -> str:
        """Number of ranks and devices, such as ``4 ranks on 2 devices``."""
        size, here = self.ranks[0]["ranks"] or 0, len(self.ranks)
        count = f"{size} ranks" if here == size else f"{here} of {size} ranks"
        devices = len({each["device"] for each in self.ranks})
        return f"{count} on {devices} device{'' if devices == 1 else 's'}"

    @property
    def memory(self) -> int:
        """Bytes of device memory that its ranks use."""
        return sum(each["memory"] for each in self.ranks)


@dataclass(frozen=True)
class SessionRow:
    """A session.

    Parameters
    ----------
    depth : int
        As in `JobRow`.
    session : SessionView
    rank : int or None
        Its rank, if it is below the row of a job.
    """

    depth: int
    session: SessionView
    rank: int | None = None

    @property
    def name(self) -> str:
        """Name of the session; below its job, its rank alone."""
        return self.session["name"] if self.rank is None else f"rank {self.rank}"


def rows(sessions: Sequence[SessionView]) -> list[JobRow | SessionRow]:
    """Return the rows of sessions, in their order; children and ranks follow what is above them."""
    known = {each["id"] for each in sessions}
    below: dict[str, list[SessionView]] = {}
    for each in sessions:
        parent = each["parent"] if each["parent"] in known else ""
        below.setdefault(parent, []).append(each)
    return list(_rows(below, "", 0))


def _rows(
    below: dict[str, list[SessionView]], parent: str, depth: int
) -> Iterator[JobRow | SessionRow]:
    jobs: dict[tuple[str, str], list[SessionView]] = {}
    siblings = below.get(parent, [])
    for each in siblings:
        if _is_rank(each):
            jobs.setdefault((each["owner"], each["job"]), []).append(each)
    for each in siblings:
        if not _is_rank(each):
            yield SessionRow(depth, each)
            yield from _rows(below, each["id"], depth + 1)
        elif ranks := jobs.pop((each["owner"], each["job"]), []):
            ranks.sort(key=lambda rank: rank["rank"] or 0)
            yield JobRow(depth, ranks)
            for rank in ranks:
                yield SessionRow(depth + 1, rank, rank["rank"])
                yield from _rows(below, rank["id"], depth + 2)


def _is_rank(session: SessionView) -> bool:
    return (session["ranks"] or 1) > 1
