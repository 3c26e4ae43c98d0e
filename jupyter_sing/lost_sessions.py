"""Kernels of this server whose session has ended, and the device state with it.

Their daemon has ended, or has closed the session. They keep their variables, but cells that need
the device fail until the kernel is restarted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kernelproxy.agent.checkpoint.catalog import CheckpointCatalog
from kernelproxy.agent.session.reasons import user_name
from kernelproxy.common import options, paths
from kernelproxy.common.errors import StoreError
from kernelproxy.common.protocol.views import CheckpointView, LastCheckpointView, SessionView
from kernelproxy.storage.chunk_store import ChunkStore

REASON = "The GPU session has ended, and its GPU memory is lost. Restart the kernel."
RESTORE = "The GPU session has ended. To continue, restart the kernel and restore checkpoint {}."


@dataclass(frozen=True)
class KernelWithSession:
    """Kernel of this server, and the session that was opened for it.

    Parameters
    ----------
    kernel_id, session : str
    notebook : str
        Path on disk; "" if it is not known.
    """

    kernel_id: str
    session: str
    notebook: str


class Kernels:
    """Kernels of this server.

    Parameters
    ----------
    manager : jupyter_client.multikernelmanager.MultiKernelManager
        The server's own.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def with_session(self) -> set[KernelWithSession]:
        """Return the kernels for which a session was opened and not closed."""
        found = set()
        for kernel_id in self._manager.list_kernel_ids():
            provisioner = getattr(self._manager.get_kernel(kernel_id), "provisioner", None)
            if session := getattr(provisioner, "session", ""):
                found.add(
                    KernelWithSession(kernel_id, session, getattr(provisioner, "notebook", ""))
                )
        return found


def lost(
    before: Iterable[KernelWithSession],
    after: set[KernelWithSession],
    known: Iterable[SessionView],
) -> list[KernelWithSession]:
    """Return kernels whose sessions have ended.

    Parameters
    ----------
    before, after : set of KernelWithSession
        Kernels with a session: before the status request was sent, and after its reply.
    known : iterable of dict
        Sessions that the daemon knows. A session that replaced another has the same kernel.
    """
    sessions, kernels = set(), set()
    for each in known:
        sessions.add(each["id"])
        kernels.add(each["kernel_id"])
    gone = [e for e in before if e in after and e.session not in sessions]
    return sorted((e for e in gone if e.kernel_id not in kernels), key=lambda e: e.session)


async def described(gone: Iterable[KernelWithSession]) -> list[SessionView]:
    """Describe lost sessions as the daemon would, with the checkpoints that can restore them."""
    gone = list(gone)
    stored = await _on_disk() if gone else []
    return [_describe(each, _last(each, stored)) for each in gone]


def _last(kernel: KernelWithSession, stored: Iterable[CheckpointView]) -> CheckpointView | None:
    """Return the newest checkpoint of a kernel's notebook."""
    for each in stored:
        mine = each.get("kernel_id") == kernel.kernel_id
        if "problem" not in each and (mine or (kernel.notebook == each["notebook"] != "")):
            return each
    return None


async def stored() -> list[CheckpointView]:
    """List this user's checkpoints without a daemon, the newest first.

    Raises
    ------
    StoreError, OSError
        If they cannot be read.
    """
    directory = paths.data_dir() / "states"
    if not directory.is_dir():
        return []
    return await CheckpointCatalog(lambda: ChunkStore(directory)).all(os.getuid())


async def _on_disk() -> list[CheckpointView]:
    """As `stored`, but empty if that fails; only the list itself reports the error."""
    try:
        return await stored()
    except (StoreError, OSError):
        return []


def _describe(kernel: KernelWithSession, last: CheckpointView | None) -> SessionView:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    checkpoint: LastCheckpointView | None = last and {
        "name": last["name"],
        "created": last["created"],
        "automatic": last["automatic"],
        "earlier": False,
        "died": False,
    }
    return {
        "id": kernel.session,
        "name": os.path.basename(kernel.notebook) or f"kernel-{kernel.kernel_id[:8]}",
        "owner": options.user() or user_name(os.getuid()),
        "kernel_id": kernel.kernel_id,
        "kernel_pid": None,
        "worker_pid": None,
        "state": "failed",
        "tier": "cold",
        "device": None,
        "memory": 0,
        "log_head": 0,
        "log_consumed": 0,
        "log_bytes": 0,
        "last_activity": now,
        "operators": 0,
        "gpu_seconds": 0.0,
        "step_seconds": None,
        "memory_nadir": None,
        "recoverable": False,
        "served_as": None,
        "promised": None,
        "shared": None,
        "queued_for": 0.0,
        "queue_position": None,
        "expected_wait": None,
        "suspended_by": None,
        "suspended_at": None,
        "pinned": False,
        "priority": None,
        "reason": RESTORE.format(last["name"]) if last else REASON,
        "loading": 0,
        "snapshot": None,
        "migration": None,
        "exactness": None,
        "automatic": {"every": 0.0, "cells": 0, "keep": 1, "problem": ""},
        "last_checkpoint": checkpoint,
        "progress": None,
        "parent": "",
        "job": "",
        "rank": None,
        "ranks": None,
    }
