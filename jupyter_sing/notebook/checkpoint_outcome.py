"""CheckpointOutcome of a checkpoint whose daemon died before it replied."""

from __future__ import annotations

from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import CheckpointReply, LastCheckpoint
from kernelproxy.common.protocol.views import CheckpointView

NOT_SAVED = "The daemon ended during the save. The checkpoint was not saved: save it again."


class CheckpointOutcome:
    """Comparison of a session's last checkpoint with the one at construction.

    Parameters
    ----------
    session : str
        Id, unique prefix of one, or name.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._before = self._last()

    def after(self, error: ControlError) -> CheckpointView:
        """Return the new checkpoint as `CheckpointsRequest` lists it.

        Parameters
        ----------
        error : ControlError
            Error that arrived instead of a reply.

        Raises
        ------
        ControlError
            `error`, if the daemon sent it, or if its successor cannot be reached. Otherwise an
            error which says that nothing was saved.
        """
        if error.reason != "no-daemon":
            raise error
        try:
            last = self._last()
        except ControlError:
            raise error from None
        if last is None or (self._before is not None and last["name"] == self._before["name"]):
            raise ControlError(NOT_SAVED, "failed") from error
        return last

    def _last(self) -> CheckpointView | None:
        with connect(start=False) as control:
            try:
                return control.expect(CheckpointReply, LastCheckpoint(self._session)).checkpoint
            except ControlError as error:
                if error.reason != "unknown-checkpoint":
                    raise
                return None
