"""What Jupyter sees of device sessions: server extension, REST, `%sing`, `jupyter sing`.

Importing this changes nothing, and needs the standard library only: kernels import it for `%sing`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"

#: To whom loads the extension where no provisioner of ours has started Python.
NO_SESSION = (
    "jupyter_sing: no GPU session here. Use a notebook or `jupyter console`; for a script, "
    "`jupyter sing run SCRIPT`."
)


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Called by jupyter_server to find the extension."""
    extension = importlib.import_module("jupyter_sing.server.extension")  # never in a kernel
    return [{"module": "jupyter_sing", "app": extension.SingExtension}]


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Called by ``jupyter-builder develop`` to find what was built of ``labextension/``."""
    return [{"src": "labextension", "dest": "jupyter-sing"}]


def load_ipython_extension(ip: Any) -> None:
    """Called by ``%load_ext jupyter_sing``; kernels of the provisioner have it already."""
    from jupyter_sing.notebook import magics

    magics.load_ipython_extension(ip)
    if not os.environ.get("SING_SESSION") and not os.environ.get("SING_REASON"):
        print(NO_SESSION)
