"""History of a notebook: checkpoints of its earlier kernels, and how those kernels ended."""

from __future__ import annotations

from collections.abc import Collection

from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog, created_text
from kernelproxy.agent.checkpoint.retention import (
    CheckpointOrigin,
    KernelRun,
    LastCheckpointFound,
    last,
    of_notebook,
)
from kernelproxy.agent.session.core import SessionCore
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol.views import CheckpointView, LastCheckpointView

#: Number of remembered runs that died; of older ones only a hint is lost.
_DEATHS_MAX = 1000


class KernelRuns:
    """The runs of kernels that this daemon has seen."""

    def __init__(self) -> None:
        self._live: set[str] = set()
        self._died: dict[str, None] = {}

    @property
    def live(self) -> Collection[str]:
        """Runs that continue. The session of an ended one may still be closing."""
        return self._live

    @property
    def died(self) -> Collection[str]:
        """Runs that ended unexpectedly."""
        return self._died.keys()

    def began(self, run: str) -> None:
        """Note that a run continues."""
        self._live.add(run)

    def ended(self, run: str, *, died: bool) -> None:
        """Note how a run ended; a later call replaces an earlier one."""
        self._live.discard(run)
        self._died.pop(run, None)
        if died:
            self._died[run] = None
            while len(self._died) > _DEATHS_MAX:
                del self._died[next(iter(self._died))]


async def last_of_ended(
    run: KernelRun, owner: int, checkpoints: CheckpointCatalog, runs: KernelRuns
) -> CheckpointView:
    """Find the checkpoint to restore of a run that has ended, also of an earlier daemon's run.

    Returns
    -------
    dict
        Its entry, as in `CheckpointCatalog.all`.

    Raises
    ------
    ControlError
        ``unknown-checkpoint``.
    StoreError
        If the store cannot be read.
    """
    mine = of_notebook(await checkpoints.records(owner), run, runs.live)
    if not mine:
        raise ControlError("There is no checkpoint of its notebook.", "unknown-checkpoint")
    return await checkpoints.one(owner, mine[-1].name)


class CheckpointHistory:
    """The checkpoints of one session's notebook.

    Parameters
    ----------
    core : SessionCore
    checkpoints : CheckpointCatalog
    runs : KernelRuns
    """

    def __init__(self, core: SessionCore, checkpoints: CheckpointCatalog, runs: KernelRuns) -> None:
        self._core, self._checkpoints, self._runs = core, checkpoints, runs
        self._run = KernelRun(core.id, core.kernel_id, core.notebook)
        #: See `retention.last`.
        self.fresh = True

    def note_use(self) -> None:
        """Mark earlier checkpoints as handled, after a restore or a manual checkpoint."""
        if self.fresh:
            self.fresh = False
            self._core.persist()

    async def mine(self) -> list[CheckpointOrigin]:
        """Return the notebook's checkpoints, the oldest first; raises StoreError."""
        return self._choose(await self._checkpoints.records(self._core.owner))

    async def last(self) -> CheckpointView:
        """Return the checkpoint to restore, as in `CheckpointCatalog.all`.

        Raises
        ------
        ControlError
            ``unknown-checkpoint``.
        """
        found = self._last(await self.mine())
        if found is None:
            raise ControlError(
                f"There is no checkpoint of {self._core.name}: %sing checkpoints lists those "
                "of other notebooks.",
                "unknown-checkpoint",
            )
        return await self._checkpoints.one(self._core.owner, found.record.name)

    def describe(self) -> LastCheckpointView | None:
        """Return ``last_checkpoint`` of ``openapi.yaml``."""
        found = self._last(self._choose(self._checkpoints.known(self._core.owner)))
        if found is None:
            return None
        return {
            "name": found.record.name,
            "created": created_text(found.record.created),
            "automatic": found.record.automatic,
            "earlier": found.earlier,
            "died": found.died,
        }

    def _choose(self, found: Collection[CheckpointOrigin]) -> list[CheckpointOrigin]:
        return of_notebook(found, self._run, self._runs.live)

    def _last(self, mine: Collection[CheckpointOrigin]) -> LastCheckpointFound | None:
        return last(mine, self._run.id, self._runs.died, fresh=self.fresh)
