"""Names of notebooks for kernels, as far as this server knows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernelproxy.common.protocol.views import SessionView


def contents_path(notebook: str, root: str) -> str:
    """Return the path of a notebook for the contents API.

    Parameters
    ----------
    notebook : str
        Path on disk.
    root : str
        Root directory of the contents; "" if the contents are not a directory.

    Returns
    -------
    str
        Path for the contents API; "" if the notebook is outside of `root`.
    """
    if not root or not os.path.isabs(notebook):
        return ""
    path = Path(os.path.normpath(notebook))
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


class NotebookNames:
    """Names sessions after the notebooks that their kernels belong to.

    Parameters
    ----------
    session_manager : jupyter_server.services.sessions.sessionmanager.SessionManager
        The server's own, or any object with its ``list_sessions``.
    """

    def __init__(self, session_manager: Any) -> None:
        self._session_manager = session_manager

    async def name(self, sessions: Sequence[SessionView]) -> list[SessionView]:
        """Return copies of `sessions` in which ``name`` is the notebook's path, where known."""
        paths = {
            found["kernel"]["id"]: found["path"]
            for found in await self._session_manager.list_sessions()
            if found.get("kernel") and found.get("path")
        }
        return [{**each, "name": paths.get(each["kernel_id"], each["name"])} for each in sessions]
