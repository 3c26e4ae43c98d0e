"""Build hook: puts the native sources, and libraries where torch is found, into the wheel.

The sources make a first-use build possible in any environment. When the environment that is
installed into has a torch (build isolation leaves `sys.prefix` alone), the libraries for exactly
that torch are built now, so that the first kernel starts without waiting. Neither is needed for
an installation to succeed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("oplog", "client", "worker")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is made; editable installs use the tree itself."""
        if version == "editable":
            return
        root = Path(self.root)
        for part in PARTS:
            for source in sorted((root / "native" / part).glob("*.[hc]*")):
                build_data["force_include"][str(source)] = (
                    f"kernelproxy/_native/{part}/{source.name}"
                )
        libraries = self._libraries(root)
        if libraries is None:
            return
        for library in libraries.iterdir():
            build_data["force_include"][str(library)] = (
                f"kernelproxy/_native_lib/{libraries.name}/{library.name}"
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _libraries(self, root: Path) -> Path | None:
        """The directory of the libraries for the torch of this environment, None without one."""
        torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
        if not (torch / "version.py").is_file():
            return None
        sys.path.insert(0, str(root))
        try:
            from kernelproxy import native

            info = native.describe(torch)
            # From a clone, too: a user's compiler may warn of what ours does not.
            parts = native.ensure(
                info,
                self.app.display_info,
                developing=False,
                cache=Path(self.directory) / "native",
            )
        except Exception as error:
            # Not installing would be worse than building at first use, which explains itself.
            self.app.display_warning(f"the native part will be built at first use: {error}")
            return None
        finally:
            sys.path.remove(str(root))
        return parts.client.parent


def _platform_tag() -> str:
    """The platform of the machine: the libraries are for it alone."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
