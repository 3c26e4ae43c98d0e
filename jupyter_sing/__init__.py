"""Jupyter's part of device sessions: server extension, REST, `%sing`, `jupyter sing`.

Importing this has no side effects, and needs the standard library only: kernels import it for
`%sing`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"

#: Printed if the extension is loaded in a kernel that our provisioner has not started.
NO_SESSION = (
    "jupyter_sing: no GPU session here. Use a notebook or `jupyter console`; for a script, "
    "`jupyter sing run SCRIPT`."
)


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Return the extension points; called by jupyter_server."""
    extension = importlib.import_module("jupyter_sing.server.extension")  # never in a kernel
    return [{"module": "jupyter_sing", "app": extension.SingExtension}]


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Return where ``labextension/`` was built; called by ``jupyter-builder develop``."""
    return [{"src": "labextension", "dest": "jupyter-sing"}]


def load_ipython_extension(ip: Any) -> None:
    """Load ``%sing``; called by ``%load_ext``. Kernels of the provisioner have it already."""
    from jupyter_sing.notebook import magics

    magics.load_ipython_extension(ip)
    if not os.environ.get("SING_SESSION") and not os.environ.get("SING_REASON"):
        print(NO_SESSION)
