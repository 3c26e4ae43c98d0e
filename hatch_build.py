"""Build hook: puts the native sources, and libraries where they can be built, into the wheel.

The sources make a first-use build possible in any environment. When the environment that is
installed into has a torch (build isolation leaves `sys.prefix` alone), the libraries for exactly
that torch are built now, so that the first kernel starts without waiting; so are the file tracker
and the sandbox, which need none. Nothing of it is needed for an installation to succeed.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("oplog", "client", "worker", "fstrack", "sandbox")


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
        sys.path.insert(0, str(root))
        try:
            directories = [*self._torch_libraries(), *self._tracker(), *self._sandbox()]
        finally:
            sys.path.remove(str(root))
        for directory in directories:
            for library in directory.iterdir():
                build_data["force_include"][str(library)] = (
                    f"kernelproxy/_native_lib/{directory.name}/{library.name}"
                )
        if directories:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"

    # From a clone, too, as users: their compilers may warn of what ours does not.

    def _torch_libraries(self) -> list[Path]:
        """The directory of the libraries for the torch of this environment, if it has one."""
        torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
        if not (torch / "version.py").is_file():
            return []
        try:
            from kernelproxy import native

            info = native.describe(torch)
            say = self.app.display_info
            return [native.ensure(info, say, developing=False, cache=self._cache).client.parent]
        except Exception as error:
            # Not installing would be worse than building at first use, which explains itself.
            self.app.display_warning(f"the native part will be built at first use: {error}")
            return []

    def _tracker(self) -> list[Path]:
        """The directory of the file tracker."""
        try:
            from kernelproxy import fstrack

            say = self.app.display_info
            return [fstrack.library(say, developing=False, cache=self._cache).parent]
        except Exception as error:
            self.app.display_warning(f"the file tracker will be built at first use: {error}")
            return []

    def _sandbox(self) -> list[Path]:
        """The directory of the program that starts kernels whose process can be saved."""
        try:
            from kernelproxy.process import sandbox

            say = self.app.display_info
            return [sandbox.program(say, developing=False, cache=self._cache).parent]
        except Exception as error:
            self.app.display_warning(f"the sandbox will be built at first use: {error}")
            return []

    @property
    def _cache(self) -> Path:
        return Path(self.directory) / "native"


def _platform_tag() -> str:
    """The platform of the machine: the libraries are for it alone."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
