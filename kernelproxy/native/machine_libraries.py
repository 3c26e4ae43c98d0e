"""Libraries that root has built for all users of a machine: `jupyter sing build`.

They are in ``/var/cache/jupyter-sing/native``, or in ``JUPYTER_SING_NATIVE_DIR``. They are loaded
only if root (or this user) wrote them, no other user can replace them, and their digests match a
list that is stored with them. In a sandbox, root has no mapped uid, so kernels there can only use
the default directory. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kernelproxy.common.errors import ControlError, NativeError
from kernelproxy.common.options import NATIVE_DIR
from kernelproxy.common.ownership import check_file, own_directory

T = TypeVar("T")

VARIABLE = NATIVE_DIR.variable
USUAL = Path(NATIVE_DIR.default)
DIGESTS = "digests.json"
_REMEDY = f"ask root for `jupyter sing build`, or set {VARIABLE}"


def directory() -> Path:
    """Return the directory of the machine's libraries; it is not created."""
    return Path(os.path.abspath(os.environ.get(VARIABLE) or USUAL))


def inside(key: str, look: Callable[[Path], T | None]) -> T | None:
    """Find libraries that were built for the machine.

    Parameters
    ----------
    key : str
        Name of their directory.
    look : callable
        Returns the libraries in a directory, or None if it is incomplete.

    Returns
    -------
    object or None
        Result of `look`; None if there are none, or if this container cannot tell who owns them.

    Raises
    ------
    NativeError
        Another user could have put them there, or they are not what was built.
    """
    found = directory() / key
    digests = found / DIGESTS
    if not digests.exists():
        return None
    try:
        check_file(digests, _REMEDY)
        for name, digest in json.loads(digests.read_text("utf-8")).items():
            check_file(found / name, _REMEDY)
            if digest_of(found / name) != digest:
                raise NativeError(f"{found / name} is not what was built: {_REMEDY}")
    except ControlError as error:
        if error.reason == "unknown-owner":  # not usable, but not dangerous
            return None
        raise NativeError(error.message.rstrip(".")) from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise NativeError(f"{found} cannot be read ({error}): {_REMEDY}") from error
    return look(found)


def build(builds: list[Callable[[Path], Path]]) -> list[Path]:
    """Build libraries for all users.

    Parameters
    ----------
    builds : list of callable
        Each receives the machine's directory, builds into a subdirectory unless that exists, and
        returns a file in it; or a path elsewhere if the package contains the file.

    Returns
    -------
    list of Path
        Directories of the libraries.

    Raises
    ------
    NativeError
        This user has no permission, or they cannot be built.
    """
    target = directory()
    mask = os.umask(0o022)
    try:
        target.mkdir(parents=True, exist_ok=True)
        own_directory(target, f"set {VARIABLE}")
        target.chmod(0o755)
        places = []
        for each in builds:
            place = each(target).parent
            places.append(place)
            if place.parent == target:
                _publish(place)
    except ControlError as error:
        raise NativeError(error.message.rstrip(".")) from error
    except OSError as error:
        raise NativeError(f"libraries for all users cannot be built: {error}") from error
    finally:
        os.umask(mask)
    return places


def _publish(place: Path) -> None:
    """Write the digests of the files in a directory, and make all readable for all users."""
    names = sorted(each for each in place.iterdir() if each.name != DIGESTS)
    for each in names:
        each.chmod(0o755)
    place.chmod(0o755)
    partial = place.with_name(f".{place.name}.digests")
    partial.write_text(json.dumps({each.name: digest_of(each) for each in names}), "utf-8")
    partial.chmod(0o644)
    partial.rename(place / DIGESTS)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
