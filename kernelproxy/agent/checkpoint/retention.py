"""Selection of checkpoints: those of a notebook, the one to restore, those to delete. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointOrigin:
    """The origin of a checkpoint, from its manifest.

    Parameters
    ----------
    name : str
    created : float
        Seconds since 1970.
    automatic : bool
        True if it was made without a request by a user.
    run : str
        Id of the session of which it was made, that is, of one run of a kernel.
    kernel_id, notebook : str
        Jupyter's id of that kernel, and path of its notebook; "" if unknown.
    """

    name: str
    created: float
    automatic: bool
    run: str
    kernel_id: str
    notebook: str


@dataclass(frozen=True)
class KernelRun:
    """A run of a kernel.

    Parameters
    ----------
    id, kernel_id, notebook : str
        See `CheckpointOrigin`.
    """

    id: str
    kernel_id: str
    notebook: str


@dataclass(frozen=True)
class LastCheckpointFound:
    """The checkpoint that restores a notebook.

    Parameters
    ----------
    record : CheckpointOrigin
    earlier : bool
        True if it is of an earlier run of the notebook's kernel.
    died : bool
        True if that run is known to have ended unexpectedly.
    """

    record: CheckpointOrigin
    earlier: bool
    died: bool


def of_notebook(
    found: Iterable[CheckpointOrigin], run: KernelRun, live: Collection[str]
) -> list[CheckpointOrigin]:
    """Return the checkpoints of a run's notebook, the oldest first.

    A restarted kernel keeps its id, and a notebook keeps its path when it gets another kernel; two
    notebooks of the same name in two directories have two paths. Checkpoints of other kernels that
    run now are excluded: two kernels may have been given one path.
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


def surplus(mine: Iterable[CheckpointOrigin], run: str, keep: int) -> list[str]:
    """Return the automatic checkpoints of a notebook that are no longer needed.

    The newest ones of the current run of its kernel are kept, and the newest one of each of the
    latest earlier runs: the last checkpoint of a kernel that died outlives those of the next one.

    Parameters
    ----------
    mine : iterable of CheckpointOrigin
        Checkpoints of the notebook, the oldest first.
    run : str
        The current run.
    keep : int
        Number to keep of this run, and number of earlier runs of which one is kept.

    Returns
    -------
    list of str
        Names, the oldest first; only automatic ones.
    """
    automatic = [each for each in mine if each.automatic]
    newest = {each.run: each for each in automatic if each.run != run}
    earlier = [each for each in automatic if newest.get(each.run) is each]
    kept = earlier[-keep:] + [each for each in automatic if each.run == run][-keep:]
    return [each.name for each in automatic if each not in kept]


def last(
    mine: Iterable[CheckpointOrigin], run: str, died: Collection[str], *, fresh: bool
) -> LastCheckpointFound | None:
    """Return the checkpoint that restores a notebook; None if there is none.

    Parameters
    ----------
    mine : iterable of CheckpointOrigin
        Checkpoints of the notebook, the oldest first.
    run : str
        The current run.
    died : collection of str
        Runs that are known to have ended unexpectedly.
    fresh : bool
        True if this run has restored nothing, and no user has saved it: then its automatic
        checkpoints do not hide those of an earlier run that died.
    """
    newest = list(mine)
    if not newest:
        return None
    earlier = [each for each in newest if each.run != run]
    chosen = earlier[-1] if fresh and earlier and earlier[-1].run in died else newest[-1]
    return LastCheckpointFound(chosen, chosen.run != run, chosen.run in died)
