"""Probe for how kernels' processes can be saved on this machine, run once at the daemon's start."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernelproxy.agent.process.process_manager import NOT_SHARED
from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import mode_probe
from kernelproxy.criu.sandbox import Form

log = logging.getLogger(__name__)

#: How long opening a session waits for the probe, at most: kernels must start.
WAIT_SECONDS = 8.0


class SandboxProbe:
    """Finds the sandbox form that works here, in a thread.

    Parameters
    ----------
    directory : Path or None
        Where the result is cached; None: the system daemon has no such form.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._trying: asyncio.Task[Form] | None = None

    def begin(self) -> None:
        """Start the probe."""
        if self._directory is None:
            return
        self._trying = asyncio.create_task(asyncio.to_thread(mode_probe.find, self._directory))
        self._trying.add_done_callback(_log_outcome)

    async def get(self) -> tuple[dict[str, Any] | None, str]:
        """Return the form, or None and a user-facing reason why there is none."""
        if self._directory is None:
            return None, NOT_SHARED
        if self._trying is None:
            return None, "it was not tried"
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return asdict(await asyncio.shield(self._trying)), ""
        except TimeoutError:
            return None, f"a trial is not over after {WAIT_SECONDS:g} s"
        except ProcessError as error:
            return None, str(error)
        except Exception as error:  # a bug of ours must not prevent a kernel from starting
            return None, f"internal error: {type(error).__name__}: {error}"


def _log_outcome(trying: asyncio.Task[Form]) -> None:
    if trying.cancelled():
        return
    error = trying.exception()
    if error is None:
        log.info("Processes can be saved: %s", trying.result())
    elif isinstance(error, ProcessError):
        log.info("Processes are not saved: %s", error)
    else:
        log.error("Whether processes can be saved is not known", exc_info=error)
