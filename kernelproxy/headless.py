"""Devices for kernels that are started without a Jupyter server: by nbclient, papermill,
`jupyter execute`, `jupyter console` and other programs that use jupyter_client.

There is no common configuration for all of these. So ``jupyter_sing.pth`` imports this module
whenever Python starts in an environment in which jupyter_sing is installed. It does nothing more
until a program imports the module that chooses the default kernel provisioner. Standard library
only, with few imports.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would add 10 ms to each start of Python

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

CHOOSER = "jupyter_client.provisioning.factory"
PROVISIONER = "sing"
#: Environment variable (with a prefix) that disables this.
#: In servers, our server extension does this; where it is disabled, kernels have no devices.
_SERVER = "jupyter_server.serverapp"


class _Finder:
    """Import hook that finds `CHOOSER` in the usual way, and changes it when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for each module that is imported for the first time."""
        if name != CHOOSER:
            return None
        remove()
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_changed(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = execute_changed  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def install() -> None:
    """Install the import hook, so that `CHOOSER` is changed when it is imported."""
    if CHOOSER not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def remove() -> None:
    """Undo `install`."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def change(module: ModuleType) -> None:
    """Make `PROVISIONER` the default of kernels that name none, if no other one is configured."""
    factory = module.KernelProvisionerFactory
    initialize = factory.__init__

    def initialize_changed(self: Any, **options: Any) -> None:
        initialize(self, **options)
        if is_wanted(self):
            self.default_provisioner_name = PROVISIONER

    factory.__init__ = initialize_changed


def is_wanted(factory: Any) -> bool:
    """True if no default provisioner is configured, and this feature is not disabled.

    Parameters
    ----------
    factory : KernelProvisionerFactory
    """
    import os

    from kernelproxy.common.options import HEADLESS

    return (
        HEADLESS.is_on()
        and factory.default_provisioner_name_env not in os.environ
        and "default_provisioner_name" not in factory.config.KernelProvisionerFactory
        and not is_of_server(factory)
    )


def is_of_server(factory: Any) -> bool:
    """True if a factory of provisioners, or a provisioner, belongs to a server (by its parents)."""
    server = getattr(sys.modules.get(_SERVER), "ServerApp", None)
    while factory is not None and server is not None:
        if isinstance(factory, server):
            return True
        factory = getattr(factory, "parent", None)
    return False


install()
