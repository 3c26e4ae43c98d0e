"""Build hook: adds the labextension, the native sources, and, where they can be built, the native
libraries to the wheel.

The sources allow a build at first use in any environment. If the target environment has a torch
(build isolation does not change `sys.prefix`), the libraries for exactly that torch are built now,
so that the first kernel starts without waiting. The file tracker and the sandbox, which need no
torch, are built now, too. `make wheels` names other torches, in JUPYTER_SING_TORCH_DIRS. The
labextension is used as it was built, or built with Node if Node exists. None of these is required
for an installation to succeed: `jupyter sing doctor` reports what is missing.
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
#: Directories of torches, separated as in PATH, for which a wheel contains libraries.
TORCHES = "JUPYTER_SING_TORCH_DIRS"
PARTS = ("oplog", "ops", "client", "worker", "fstrack", "sandbox")


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
            # The machine's libraries come with a file of digests, which is not needed.
            for library in set(directory.iterdir()) - {*directory.glob("*.json")}:
                build_data["force_include"][str(library)] = (
                    f"kernelproxy/_native_lib/{directory.name}/{library.name}"
                )
        if directories:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _labextension(self, root: Path) -> Path | None:
        """Return the directory of the built labextension; None if it cannot be built."""
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

    # With `developing=False` even in a checkout: users' compilers may have more warnings than ours.

    def _torch_libraries(self) -> list[Path]:
        """Return the directories of the libraries for the named torches, else for this
        environment's torch, if it has one.
        """
        if named := os.environ.get(TORCHES):
            # Named libraries are required: a failure here ends the build of the wheel.
            return [self._libraries_for(Path(each)) for each in named.split(os.pathsep)]
        torch = Path(sysconfig.get_paths()["purelib"]) / "torch"
        if not (torch / "version.py").is_file():
            return []
        try:
            return [self._libraries_for(torch)]
        except Exception as error:
            # A build at first use, with its own messages, is better than a failed installation.
            self.app.display_warning(f"the native part will be built at first use: {error}")
            return []

    def _libraries_for(self, torch: Path) -> Path:
        """Return the directory of the libraries for a torch and the running Python."""
        from kernelproxy.native import build, libraries

        say = libraries.lines(self.app.display_info)
        info = build.describe(torch)
        return build.ensure(info, say, developing=False, cache=self._cache).client.parent

    def _tracker(self) -> list[Path]:
        """Return the directory of the file tracker, in a list; an empty list if not built."""
        try:
            from kernelproxy.native import libraries, tools

            say = libraries.lines(self.app.display_info)
            return [tools.file_tracker(say, developing=False, cache=self._cache).parent]
        except Exception as error:
            self.app.display_warning(f"the file tracker will be built at first use: {error}")
            return []

    def _sandbox(self) -> list[Path]:
        """Return the directory of the sandbox program, in a list; an empty list if not built.

        The sandbox starts kernels whose process can be saved.
        """
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
    """Import `kernelproxy` from a source tree, even if an installed one is already imported."""
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
    """Return the platform tag of this machine, because the libraries are only for it."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
