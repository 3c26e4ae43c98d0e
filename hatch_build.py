"""Build hook: puts the labextension, the native sources, and libraries where they can be built,
into the wheel.

The sources make a first-use build possible in any environment. When the environment that is
installed into has a torch (build isolation leaves `sys.prefix` alone), the libraries for exactly
that torch are built now, so that the first kernel starts without waiting; so are the file tracker
and the sandbox, which need none. `make wheels` names other torches, in JUPYTER_SING_TORCH_DIRS. The
labextension is taken as it was built, or built by Node where there is one. Nothing else of it is
needed for an installation to succeed: `jupyter sing doctor` says what is lacking.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LABEXTENSION = "share/jupyter/labextensions/jupyter-sing"
#: Directories of torches, as in PATH, that a wheel is to have libraries for.
TORCHES = "JUPYTER_SING_TORCH_DIRS"
PARTS = ("oplog", "client", "worker", "fstrack", "sandbox")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is made; editable installs use the tree itself."""
        if version == "editable":
            return
        root = Path(self.root)
        for part in PARTS:
            for source in sorted((root / "native" / part).rglob("*.[hc]*")):
                inside = source.relative_to(root / "native")
                build_data["force_include"][str(source)] = f"kernelproxy/_native/{inside}"
        if self.target_name == "wheel" and (built := self._labextension(root)):
            build_data["shared_data"][str(built)] = LABEXTENSION
            build_data["shared_data"][str(root / "labextension/install.json")] = (
                f"{LABEXTENSION}/install.json"
            )
        with _modules_of(root):
            directories = [*self._torch_libraries(), *self._tracker(), *self._sandbox()]
        for directory in directories:
            # Beside those of the machine lies what they are checked by.
            for library in set(directory.iterdir()) - {*directory.glob("*.json")}:
                build_data["force_include"][str(library)] = (
                    f"kernelproxy/_native_lib/{directory.name}/{library.name}"
                )
        if directories:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _labextension(self, root: Path) -> Path | None:
        """The directory of the built labextension."""
        built = root / "jupyter_sing" / "labextension"
        npm = shutil.which("npm")
        if (built / "package.json").is_file():
            return built
        if npm is None:
            self.app.display_warning("without Node there will be no panels in JupyterLab")
            return None
        try:
            for command in (["install"], ["run", "build"]):
                self.app.display_info(f"npm {' '.join(command)}")
                subprocess.run(
                    [npm, *command], cwd=root / "labextension", check=True, capture_output=True
                )
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip()[-500:]
            self.app.display_warning(f"there will be no panels in JupyterLab: {error} {said}")
            return None
        return built

    # From a clone, too, as users: their compilers may warn of what ours does not.

    def _torch_libraries(self) -> list[Path]:
        """Directories of the libraries for the torches that are named, else for that of this
        environment, if it has one.
        """
        if named := os.environ.get(TORCHES):
            # Who names them wants no wheel without: what fails here ends it.
            return [self._libraries_for(Path(each)) for each in named.split(os.pathsep)]
        torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
        if not (torch / "version.py").is_file():
            return []
        try:
            return [self._libraries_for(torch)]
        except Exception as error:
            # Not installing would be worse than building at first use, which explains itself.
            self.app.display_warning(f"the native part will be built at first use: {error}")
            return []

    def _libraries_for(self, torch: Path) -> Path:
        """The directory of the libraries for a torch and the Python that builds."""
        from kernelproxy.native import build, libraries

        say = libraries.lines(self.app.display_info)
        info = build.describe(torch)
        return build.ensure(info, say, developing=False, cache=self._cache).client.parent

    def _tracker(self) -> list[Path]:
        """The directory of the file tracker."""
        try:
            from kernelproxy.native import libraries, tools

            say = libraries.lines(self.app.display_info)
            return [tools.file_tracker(say, developing=False, cache=self._cache).parent]
        except Exception as error:
            self.app.display_warning(f"the file tracker will be built at first use: {error}")
            return []

    def _sandbox(self) -> list[Path]:
        """The directory of the program that starts kernels whose process can be saved."""
        try:
            from kernelproxy.native import libraries, tools

            say = libraries.lines(self.app.display_info)
            return [tools.sandbox_program(say, developing=False, cache=self._cache).parent]
        except Exception as error:
            self.app.display_warning(f"the sandbox will be built at first use: {error}")
            return []

    @property
    def _cache(self) -> Path:
        return Path(self.directory) / "native"


@contextlib.contextmanager
def _modules_of(root: Path) -> Iterator[None]:
    """Import `kernelproxy` from a source tree, also where an installed one is imported."""
    installed = {name: sys.modules.pop(name) for name in _package_modules()}
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        for name in _package_modules():
            del sys.modules[name]
        sys.modules.update(installed)


def _package_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "kernelproxy"]


def _platform_tag() -> str:
    """The platform of the machine: the libraries are for it alone."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
