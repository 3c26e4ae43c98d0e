"""What a file was like at a checkpoint, and which files are no business of checkpoints."""

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

MODE_MASK = 0o777  # nobody gets a set-user-id program out of a checkpoint

# Where a computer's software and state are: never collected, and never written to.
SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/proc", "/run", "/sbin", "/sys", "/usr"),
)

# Begins the names under which `put_back` writes.
PART_PREFIX = ".sing-"

EXCLUDED = (
    # What is made again when it is missing.
    *("*/__pycache__", "*.pyc", "*/.cache", "*/.ipynb_checkpoints", "*/.mypy_cache"),
    *("*/.pytest_cache", "*/.ruff_cache", "*/.nv", "*/.triton", "*/torchinductor_*"),
    # What has a history or an installer of its own.
    *("*/.git", "*/.hg", "*/.svn", "*/site-packages", "*/dist-packages", "*/conda-meta"),
    *("*/node_modules", "*/.npm", "*/.cargo/registry", "*/.rustup"),
    # The history and state of IPython and of debuggers, which several notebooks share.
    *("*/.ipython", "*/profile_*/history.sqlite*", "*/profile_*/db", "*/profile_*/pid"),
    *("*/profile_*/log", "*/profile_*/security", "*/profile_*/startup", "/tmp/ipykernel_*"),
    *("/var/cache", "/var/lib", "/var/log", "/var/run", "/var/spool"),
    f"*/{PART_PREFIX}*",
    *SYSTEM,
)


class Kind(StrEnum):
    """What there is under a path."""

    FILE = "file"
    ABSENT = "absent"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(frozen=True)
class FileState:
    """What a path was like.

    Parameters
    ----------
    path : Path
        Absolute, and without links in its directories.
    kind : Kind
    mode : int
        Permission bits, of files and directories.
    mtime_ns : int
        Time of the last modification, of files.
    size : int
        Bytes, of files.
    target : str
        Where it leads to, of symbolic links.
    """

    path: Path
    kind: Kind
    mode: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: str = ""

    @classmethod
    def of(cls, path: Path, found: os.stat_result) -> FileState:
        """The state of a file, by what ``lstat`` says of it."""
        return cls(path, Kind.FILE, found.st_mode & MODE_MASK, found.st_mtime_ns, found.st_size)


@dataclass(frozen=True)
class Skipped:
    """A path that was left alone, and why, in half a sentence that follows it."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


class Exclusion:
    """Patterns of paths.

    A pattern is one of `fnmatch` for absolute paths, whose ``*`` also stands for slashes; ``~`` is
    the home directory. What lies below a path that matches is excluded, too.

    Parameters
    ----------
    patterns : iterable of str
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        wanted = dict.fromkeys(os.path.expanduser(each).rstrip("/") for each in patterns)
        # Without its mark of the end, which newer Pythons write differently.
        each = [re.sub(r"\\[Zz]$", "", fnmatch.translate(one)) for one in wanted if one]
        self._found = re.compile(rf"(?:{'|'.join(each)})(?:/.*)?\Z", re.DOTALL) if each else None

    def __contains__(self, path: Path) -> bool:
        return self._found is not None and self._found.match(str(path)) is not None


def default_exclusions(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Patterns of what is left out unless told otherwise.

    Parameters
    ----------
    environ : dict, optional
        That of the kernel, which names directories of Jupyter, IPython and caches.
    """
    names = (
        *("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"),
        *("JUPYTER_SING_RUNTIME_DIR", "JUPYTER_SING_DATA_DIR", "XDG_CACHE_HOME"),
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
class Limits:
    """What a checkpoint takes of files.

    Parameters
    ----------
    exclude : tuple of str
        Patterns, see `Exclusion`.
    file_bytes, total_bytes : int
        The largest file, and all of them together.
    count : int
        Paths.
    temporary : tuple of str
        Directories in which a file that is gone is not worth mentioning: nobody will look for it.
    """

    exclude: tuple[str, ...] = field(default_factory=default_exclusions)
    file_bytes: int = 512 << 20
    total_bytes: int = 2 << 30
    count: int = 50_000
    temporary: tuple[str, ...] = ("/tmp", "/var/tmp", tempfile.gettempdir())


def special_kind(mode: int) -> str:
    """What a file is that is neither a file, a directory nor a link; "" if it is one of those."""
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISFIFO(mode):
        return "a named pipe"
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        return "a device"
    return ""
