"""Which notebook a kernel belongs to, as far as this server knows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def contents_path(notebook: str, root: str) -> str:
    """Find a notebook in the server's tree.

    Parameters
    ----------
    notebook : str
        Its path on disk.
    root : str
        Directory that the server shows; "" if what it shows is no directory.

    Returns
    -------
    str
        Its path for the contents API; "" if it is elsewhere.
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
        The server's own; anything with its ``list_sessions``.
    """

    def __init__(self, session_manager: Any) -> None:
        self._session_manager = session_manager

    async def name(self, sessions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of `sessions` in which ``name`` is the notebook's path, where known."""
        paths = {
            found["kernel"]["id"]: found["path"]
            for found in await self._session_manager.list_sessions()
            if found.get("kernel") and found.get("path")
        }
        return [{**each, "name": paths.get(each["kernel_id"], each["name"])} for each in sessions]
