"""Paths of the daemon's socket, its state and the checkpoints (standard library only)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernelproxy.common.errors import ControlError
from kernelproxy.common.options import DATA_DIR, DEVICES, RUNTIME_DIR, SYSTEM_DIR
from kernelproxy.common.ownership import check_inside, overflow_uid, own_directory

SOCKET_NAME = "agent.sock"
#: Directory of the system daemon, which all users of the machine share.
_PACKAGES = ("kernelproxy", "jupyter_sing")
#: Pure Python packages, which work with any interpreter.
_LIBRARIES = ("cloudpickle",)
_OWN = "set {} to a directory of your own"


def runtime_dir() -> Path:
    """Return the directory of the daemon's socket and state.

    If it is missing, it is created; only its owner can access it.

    Returns
    -------
    Path
        ``JUPYTER_SING_RUNTIME_DIR``, else ``sing`` in Jupyter's runtime directory.

    Raises
    ------
    ControlError
        If another user could have created files there (see `ownership.own_directory`): a user
        who can replace the socket could read every notebook.
    """
    configured = RUNTIME_DIR.text()
    directory = Path(configured) if configured else jupyter_runtime_dir() / "sing"
    return own_directory(Path(os.path.abspath(directory)), _OWN.format(RUNTIME_DIR.variable))


def data_dir() -> Path:
    """Return the directory of the checkpoints.

    It is ``JUPYTER_SING_DATA_DIR``, else ``sing`` in Jupyter's data directory.

    Raises
    ------
    ControlError
        As `runtime_dir`: a user who can create a checkpoint there can have its code executed.
    """
    configured = DATA_DIR.text()
    directory = Path(configured) if configured else jupyter_data_dir() / "sing"
    own_directory(directory := Path(os.path.abspath(directory)), _OWN.format(DATA_DIR.variable))
    check_inside(directory, _OWN.format(DATA_DIR.variable))
    return directory


def cache_dir(name: str) -> Path:
    """Return the directory for cached compiled code: in ``XDG_CACHE_HOME``, else ``~/.cache``.

    Raises
    ------
    ControlError
        As `runtime_dir`, but root may own it, too.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(os.path.abspath(base)) / "jupyter_sing" / name
    return own_directory(directory, _OWN.format("XDG_CACHE_HOME"), shared=True)


def jupyter_runtime_dir() -> Path:
    """Return Jupyter's runtime directory by Jupyter's rules, even if Jupyter is not installed."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir as rule
    except ImportError:
        configured = os.environ.get("JUPYTER_RUNTIME_DIR")
        return Path(configured) if configured else jupyter_data_dir() / "runtime"
    return Path(rule())


def jupyter_data_dir() -> Path:
    """Return this user's Jupyter data directory, by Jupyter's rules."""
    try:
        from jupyter_core.paths import jupyter_data_dir as rule
    except ImportError:
        configured = os.environ.get("JUPYTER_DATA_DIR")
        if configured:
            return Path(configured)
        home = os.environ.get("XDG_DATA_HOME")
        return (Path(home) if home else Path.home() / ".local" / "share") / "jupyter"
    return Path(rule())


def socket_path() -> Path:
    """Return the path of the daemon's socket.

    Returns
    -------
    Path
        The first of these that is set or exists: ``SING_SOCKET`` (set in kernels), the socket in
        ``JUPYTER_SING_RUNTIME_DIR``, the system daemon's, this user's own.

    Raises
    ------
    ControlError
        As `runtime_dir`, and as `system_socket`.
    """
    if named := os.environ.get("SING_SOCKET"):
        return Path(named)
    if not RUNTIME_DIR.text() and (shared := system_socket()):
        return shared
    return runtime_dir() / SOCKET_NAME


def system_dir() -> Path:
    """Return the directory of the system daemon's socket; it is not created.

    ``JUPYTER_SING_SYSTEM_DIR`` changes it.
    """
    configured = SYSTEM_DIR.text() or SYSTEM_DIR.default
    return Path(os.path.abspath(configured))


def system_socket() -> Path | None:
    """Return the system daemon's socket; None if it does not exist.

    Raises
    ------
    ControlError
        If a user other than root could have created it: that user could read every notebook.
    """
    path = system_dir() / SOCKET_NAME
    try:
        places = (path.parent.lstat(), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None
    directory, found = places
    open_to_others = directory.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(directory.st_mode) or open_to_others:
        raise ControlError(f"{path.parent} may be written by others than root.", "unsafe-directory")
    owners = {directory.st_uid, found.st_uid}
    if owners != {0} and owners <= {0, overflow_uid()}:
        raise ControlError(
            f"{path} belongs to a user that is not mapped in this container, which is probably the "
            "machine's root: the machine's daemon cannot serve rootless containers. Run without a "
            f"namespace of users, or set {SYSTEM_DIR.variable} to an empty directory and "
            f"{DEVICES.variable} to devices that the machine's daemon does not have.",
            "unsafe-directory",
        )
    if not stat.S_ISSOCK(found.st_mode) or owners != {0}:
        raise ControlError(
            f"{path} does not belong to root, so it is not used.", "unsafe-directory"
        )
    return path


def is_shared(path: Path) -> bool:
    """True if a socket is the system daemon's, which only root starts and stops."""
    if path == system_dir() / SOCKET_NAME:
        return True
    with suppress(OSError):  # a kernel may lack the variable that named the directory
        return path.parent.stat().st_uid == 0 != os.getuid()
    return False


def journal_path(kernel_id: str) -> Path:
    """Return the path of the journal of a kernel's file changes; the file is not created.

    Raises
    ------
    ControlError
        As `runtime_dir`.
    """
    directory = runtime_dir() / "journals"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not re.fullmatch(r"[\w-][\w.-]{0,99}", kernel_id):  # Jupyter's ids match, but others may not
        kernel_id = hashlib.sha256(os.fsencode(kernel_id)).hexdigest()[:32]
    return directory / f"{kernel_id}.files"


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short path of a socket, through its directory's descriptor.

    The full path may exceed the 108 bytes of ``sockaddr_un``, for example in the deep runtime
    directories of hubs and tests.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def package_parent() -> Path:
    """Return the directory to put on the Python path so that this package can be imported."""
    return Path(__file__).resolve().parents[2]


def bundle_dir(directory: Path | None = None, mode: int = 0o700) -> Path:
    """Return a directory with only links to our packages, for another environment's Python path.

    A kernel's environment may lack our packages. With our own site-packages on its path, all
    other packages in there would be exposed, too. The name depends on the installation, so that
    two installations can use one runtime directory.

    Parameters
    ----------
    directory : Path, optional
        Parent directory; `runtime_dir` by default.
    mode : int
        Permissions.
    """
    parent = package_parent()
    key = hashlib.sha256(os.fsencode(parent)).hexdigest()[:8]
    bundle = (directory or runtime_dir()) / f"bundle-{key}"
    for each in (bundle, beside(bundle)):
        each.mkdir(mode=mode, exist_ok=True)
        if each.stat().st_mode & mode != mode:  # the umask removed some
            each.chmod(mode)
    for name in _PACKAGES:
        _link(bundle / name, parent / name)
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            _link(beside(bundle) / name, Path(spec.origin).parent)
    return bundle


def _link(link: Path, target: Path) -> None:
    if not target.is_dir() or (link.is_symlink() and Path(os.readlink(link)) == target):
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.rename(link)  # atomic: another process may be importing through it


def beside(bundle: Path) -> Path:
    """Return a bundle's directory of links to libraries that an environment may lack.

    It goes to the end of the path: the environment's own libraries take precedence.
    """
    return bundle / "beside.ours"  # not a name that a program can import
