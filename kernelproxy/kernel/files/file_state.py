"""State of a file at a checkpoint, and patterns of files that checkpoints exclude."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.options import DATA_DIR, RUNTIME_DIR

MODE_MASK = 0o777  # without set-user-id bits: no checkpoint restores a set-user-id program

# Directories of a computer's software and state: never collected, and never written to.
SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/run", "/sbin", "/sys", "/usr"),
)

# Prefix of the temporary names to which `put_back` writes.
PART_PREFIX = ".sing-"

EXCLUDED = (
    # Files that are regenerated when they are missing.
    *("*/__pycache__", "*.pyc", "*/.cache", "*/.ipynb_checkpoints", "*/.mypy_cache"),
    *("*/.pytest_cache", "*/.ruff_cache", "*/.nv", "*/.triton", "*/torchinductor_*"),
    # Files with a history or an installer of their own.
    *("*/.git", "*/.hg", "*/.svn", "*/site-packages", "*/dist-packages", "*/conda-meta"),
    *("*/node_modules", "*/.npm", "*/.cargo/registry", "*/.rustup"),
    # The history and state of IPython and of debuggers, which several notebooks share.
    *("*/.ipython", "*/profile_*/history.sqlite*", "*/profile_*/db", "*/profile_*/pid"),
    *("*/profile_*/log", "*/profile_*/security", "*/profile_*/startup", "/tmp/ipykernel_*"),
    *("/var/cache", "/var/lib", "/var/log", "/var/run", "/var/spool"),
    f"*/{PART_PREFIX}*",
    *SYSTEM,
)


class PathKind(StrEnum):
    """Kind of a path."""

    FILE = "file"
    ABSENT = "absent"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(frozen=True)
class FileState:
    """State of a path.

    Parameters
    ----------
    path : Path
        Absolute; its directories contain no links.
    kind : Kind
    mode : int
        Permission bits, of files and directories.
    mtime_ns : int
        Time of the last modification, of files.
    size : int
        Bytes, of files.
    target : str
        Target, of symbolic links.
    """

    path: Path
    kind: PathKind
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: str = ""

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> FileState:
        """Return the state of a regular file from the result of ``lstat``."""
        return cls(path, PathKind.FILE, found.st_mode & MODE_MASK, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True)
class Skipped:
    """Path that was skipped, and the reason, as half a sentence that follows the path."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


class Exclusion:
    """Set of path patterns.

    A pattern is one of `fnmatch` for absolute paths, in which ``*`` also matches slashes; ``~`` is
    the home directory. Everything below a matching path is excluded, too.

    Parameters
    ----------
    patterns : iterable of str
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        wanted = dict.fromkeys(os.path.expanduser(each).rstrip("/") for each in patterns)
        # Without the end anchor, which newer Pythons write differently.
        each = [re.sub(r"\\[Zz]$", "", fnmatch.translate(one)) for one in wanted if one]
        self._found = re.compile(rf"(?:{'|'.join(each)})(?:/.*)?\Z", re.DOTALL) if each else None

    def __contains__(self, path: Path) -> bool:
        return self._found is not None and self._found.match(str(path)) is not None


def default_exclusions(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the patterns that are excluded by default.

    Parameters
    ----------
    environ : dict, optional
        Environment of the kernel, which names directories of Jupyter, IPython and caches.
    """
    names = (
        *("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"),
        *(RUNTIME_DIR.variable, DATA_DIR.variable, "XDG_CACHE_HOME"),
    )
    named = {environ.get(name, "") for name in names}
    ours = {str(paths.jupyter_runtime_dir()), str(paths.jupyter_data_dir())}
    directories = {os.path.realpath(each) for each in named | ours if os.path.isabs(each)}
    home = Path(os.path.realpath(Path.home()))
    named_by_mistake = {each for each in directories if home.is_relative_to(each)}
    return (*EXCLUDED, *sorted(map(_literally, directories - named_by_mistake)))


def _literally(path: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", path)


@dataclass(frozen=True)
class FileLimits:
    """Limits of the files in a checkpoint.

    Parameters
    ----------
    exclude : tuple of str
        Patterns, see `Exclusion`.
    file_bytes, total_bytes : int
        Size of the largest file, and of all files together.
    count : int
        Number of paths.
    temporary : tuple of str
        Directories in which missing files are not recorded: no user will look for them.
    """

    exclude: tuple[str, ...] = field(default_factory=default_exclusions)
    file_bytes: int = 512 << 20
    total_bytes: int = 2 << 30
    count: int = 50_000
    temporary: tuple[str, ...] = ("/tmp", "/var/tmp", tempfile.gettempdir())


def special_kind(mode: int) -> str:
    """Return the name of a special file's kind; "" for a regular file, a directory or a link."""
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        return "a device"
    return ""
