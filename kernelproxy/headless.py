"""Kernels that no server starts have devices, too: those of nbclient, papermill, `jupyter execute`,
`jupyter console` and of any program that uses jupyter_client.

No configuration reaches all of these. So ``jupyter_sing.pth`` imports this module whenever Python
starts in an environment in which we are installed. Nothing more happens until somebody imports what
chooses the provisioner of kernels that name none. Standard library only, and little of it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's would cost each start of Python 10 ms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

CHOOSER = "jupyter_client.provisioning.factory"
PROVISIONER = "sing"
#: Switches this off.
VARIABLE = "HEADLESS"
#: Servers have an extension of ours that does this; where it is off, kernels are ordinary ones.
_SERVER = "jupyter_server.serverapp"


class _Finder:
    """Finds the module that chooses as everybody else does, and changes it when it is loaded."""

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
    """Have the choice changed when somebody imports what makes it."""
    if CHOOSER not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def remove() -> None:
    """Undo `install`."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def change(module: ModuleType) -> None:
    """Make ours the provisioner of kernels that name none, where nobody has chosen another."""
    factory = module.KernelProvisionerFactory
    initialize = factory.__init__

    def initialize_changed(self: Any, **options: Any) -> None:
        initialize(self, **options)
        if is_wanted(self):
            self.default_provisioner_name = PROVISIONER

    factory.__init__ = initialize_changed


def is_wanted(factory: Any) -> bool:
    """Whether nobody has chosen a provisioner, or this not to be done.

    Parameters
    ----------
    factory : KernelProvisionerFactory
    """
    import os

    from kernelproxy.common import environment

    return (
        environment.switched_on(VARIABLE)
        and factory.default_provisioner_name_env not in os.environ
        and "default_provisioner_name" not in factory.config.KernelProvisionerFactory
        and not is_of_server(factory)
    )


def is_of_server(factory: Any) -> bool:
    """Whether a server has this, a factory of provisioners or a provisioner, directly or not."""
    server = getattr(sys.modules.get(_SERVER), "ServerApp", None)
    while factory is not None and server is not None:
        if isinstance(factory, server):
            return True
        factory = getattr(factory, "parent", None)
    return False


install()
