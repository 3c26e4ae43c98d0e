"""Which checkpoints belong to a notebook, which of them gives it back, and which may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """What a checkpoint's manifest says about where it comes from.

    Parameters
    ----------
    name : str
    created : float
        Seconds since 1970.
    automatic : bool
        Whether nobody asked for it.
    run : str
        Id of the session that it was made of: of one run of a kernel.
    kernel_id, notebook : str
        Jupyter's id of that kernel, and path of its notebook; "" if not known.
    """

    name: str
    created: float
    automatic: bool
    run: str
    kernel_id: str
    notebook: str


@dataclass(frozen=True)
class Run:
    """A run of a kernel.

    Parameters
    ----------
    id, kernel_id, notebook : str
        See `Record`.
    """

    id: str
    kernel_id: str
    notebook: str


@dataclass(frozen=True)
class Last:
    """The checkpoint that gives a notebook back.

    Parameters
    ----------
    record : Record
    earlier : bool
        Whether it is of an earlier run of the notebook's kernel.
    died : bool
        Whether that run is known to have ended though nobody wanted it to.
    """

    record: Record
    earlier: bool
    died: bool


def of_notebook(found: Iterable[Record], run: Run, live: Collection[str]) -> list[Record]:
    """Choose the checkpoints of a run's notebook, the oldest first.

    A kernel keeps its id when it is restarted, and a notebook its path when it gets another kernel;
    two notebooks of the same name in two directories have two paths. Those of other kernels that
    run now are theirs: two may have been given one path.
    """
    mine = [
        each
        for each in found
        if each.run == run.id
        or (
            each.run not in live
            and (
                (each.kernel_id and each.kernel_id == run.kernel_id)
                or (each.notebook and each.notebook == run.notebook)
            )
        )
    ]
    return sorted(mine, key=lambda each: (each.created, each.name))


def surplus(mine: Iterable[Record], run: str, keep: int) -> list[str]:
    """Choose which automatic checkpoints of a notebook are no longer needed.

    Kept are the newest of this run of its kernel and, of earlier runs, the newest of each: what a
    kernel had when it died outlives what the next one does.

    Parameters
    ----------
    mine : iterable of Record
        Checkpoints of the notebook, the oldest first.
    run : str
        The run that goes on.
    keep : int
        How many of this run, and of how many earlier runs.

    Returns
    -------
    list of str
        Names, the oldest first; only of automatic ones.
    """
    automatic = [each for each in mine if each.automatic]
    newest = {each.run: each for each in automatic if each.run != run}
    earlier = [each for each in automatic if newest.get(each.run) is each]
    kept = earlier[-keep:] + [each for each in automatic if each.run == run][-keep:]
    return [each.name for each in automatic if each not in kept]


def last(mine: Iterable[Record], run: str, died: Collection[str], *, fresh: bool) -> Last | None:
    """Find the checkpoint that gives a notebook back.

    Parameters
    ----------
    mine : iterable of Record
        Checkpoints of the notebook, the oldest first.
    run : str
        The run that goes on.
    died : collection of str
        Runs that are known to have ended though nobody wanted them to.
    fresh : bool
        Whether this run has restored nothing, and nobody has put it away: then what it makes by
        itself does not hide what a run left that died.
    """
    newest = list(mine)
    if not newest:
        return None
    earlier = [each for each in newest if each.run != run]
    chosen = earlier[-1] if fresh and earlier and earlier[-1].run in died else newest[-1]
    return Last(chosen, chosen.run != run, chosen.run in died)
