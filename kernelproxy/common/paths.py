"""Where the daemon's socket, its state and the checkpoints lie (standard library only)."""

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
from kernelproxy.common.ownership import check_inside, overflow_uid, own_directory

SOCKET_NAME = "agent.sock"
#: Of a daemon that all users of the machine share.
SYSTEM_DIR = "/run/jupyter-sing"
_PACKAGES = ("kernelproxy", "jupyter_sing")
#: Python packages alone, for any interpreter.
_LIBRARIES = ("cloudpickle",)
_OWN = "set {} to a directory of your own"


def runtime_dir() -> Path:
    """Directory of the daemon's socket and state; created, for its owner alone, if missing.

    Returns
    -------
    Path
        ``JUPYTER_SING_RUNTIME_DIR``, else ``sing`` in Jupyter's runtime directory.

    Raises
    ------
    ControlError
        If somebody else could have put something there (see `ownership.own_directory`): whoever
        can replace the socket could read every notebook.
    """
    name = "JUPYTER_SING_RUNTIME_DIR"
    configured = os.environ.get(name)
    directory = Path(configured) if configured else jupyter_runtime_dir() / "sing"
    return own_directory(Path(os.path.abspath(directory)), _OWN.format(name))


def data_dir() -> Path:
    """Directory of the checkpoints: ``JUPYTER_SING_DATA_DIR``, else ``sing`` in Jupyter's data.

    Raises
    ------
    ControlError
        As `runtime_dir`: whoever can put a checkpoint there has its code executed.
    """
    name = "JUPYTER_SING_DATA_DIR"
    configured = os.environ.get(name)
    directory = Path(configured) if configured else jupyter_data_dir() / "sing"
    own_directory(directory := Path(os.path.abspath(directory)), _OWN.format(name))
    check_inside(directory, _OWN.format(name))
    return directory


def cache_dir(name: str) -> Path:
    """Directory of what is compiled once and executed: in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises
    ------
    ControlError
        As `runtime_dir`, but it may be root's.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(os.path.abspath(base)) / "jupyter_sing" / name
    return own_directory(directory, _OWN.format("XDG_CACHE_HOME"), shared=True)


def jupyter_runtime_dir() -> Path:
    """Jupyter's runtime directory, by Jupyter's own rule whether or not it is installed here."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir as rule
    except ImportError:
        configured = os.environ.get("JUPYTER_RUNTIME_DIR")
        return Path(configured) if configured else jupyter_data_dir() / "runtime"
    return Path(rule())


def jupyter_data_dir() -> Path:
    """Jupyter's data directory of this user, by Jupyter's own rule."""
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
    """Socket of the daemon.

    Returns
    -------
    Path
        The first of these that there is: ``SING_SOCKET`` (set in kernels), the one in
        ``JUPYTER_SING_RUNTIME_DIR``, the system daemon's, this user's own.

    Raises
    ------
    ControlError
        As `runtime_dir`, and if what is in the place of the system daemon's may be somebody else's.
    """
    if named := os.environ.get("SING_SOCKET"):
        return Path(named)
    if not os.environ.get("JUPYTER_SING_RUNTIME_DIR") and (shared := system_socket()):
        return shared
    return runtime_dir() / SOCKET_NAME


def system_dir() -> Path:
    """Directory of the system daemon's socket, by ``JUPYTER_SING_SYSTEM_DIR``; not created."""
    configured = os.environ.get("JUPYTER_SING_SYSTEM_DIR") or SYSTEM_DIR
    return Path(os.path.abspath(configured))


def system_socket() -> Path | None:
    """Socket of the system daemon, if there is one.

    Raises
    ------
    ControlError
        If anybody but root could have made it: whoever did could read every notebook.
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
            f"{path} belongs to a user who has no number in this container, which is probably the "
            "machine's root: the machine's daemon cannot serve rootless containers. Run without a "
            "namespace of users, or set JUPYTER_SING_SYSTEM_DIR to an empty directory and "
            "JUPYTER_SING_DEVICES to devices that the machine's daemon does not have.",
            "unsafe-directory",
        )
    if not stat.S_ISSOCK(found.st_mode) or owners != {0}:
        raise ControlError(
            f"{path} does not belong to root, so it is not used.", "unsafe-directory"
        )
    return path


def is_shared(path: Path) -> bool:
    """Whether a socket is the system daemon's, which nobody but root starts or stops."""
    if path == system_dir() / SOCKET_NAME:
        return True
    with suppress(OSError):  # a kernel may not know by which variable it was found
        return path.parent.stat().st_uid == 0 != os.getuid()
    return False


def journal_path(kernel_id: str) -> Path:
    """Where the changes to files are noted that a kernel makes; not created.

    Raises
    ------
    ControlError
        As `runtime_dir`.
    """
    directory = runtime_dir() / "journals"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not re.fullmatch(r"[\w-][\w.-]{0,99}", kernel_id):  # Jupyter's are, but need not be
        kernel_id = hashlib.sha256(os.fsencode(kernel_id)).hexdigest()[:32]
    return directory / f"{kernel_id}.files"


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Name a socket by its directory's descriptor: its own path may exceed the 108 bytes of
    ``sockaddr_un``, as the deep runtime directories of hubs and tests do.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def package_parent() -> Path:
    """Directory that holds this package: what must be on the path for it to be importable."""
    return Path(__file__).resolve().parents[2]


def bundle_dir(directory: Path | None = None, mode: int = 0o700) -> Path:
    """Directory with nothing but links to our packages, for the path of another environment.

    A kernel's environment need not have us installed, and putting our own site-packages on its
    path would expose everything else in there. The name depends on the installation, so that
    two of them can use one runtime directory.

    Parameters
    ----------
    directory : Path, optional
        Where it is made; by default in `runtime_dir`.
    mode : int
        Who may read it.
    """
    parent = package_parent()
    key = hashlib.sha256(os.fsencode(parent)).hexdigest()[:8]
    bundle = (directory or runtime_dir()) / f"bundle-{key}"
    for each in (bundle, beside(bundle)):
        each.mkdir(mode=mode, exist_ok=True)
        if each.stat().st_mode & mode != mode:  # by the umask
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
    """Directory in a bundle with links to libraries that we need and an environment may lack.

    It goes to the end of the path: what the environment has comes first.
    """
    return bundle / "beside.ours"  # no name that a program could import
