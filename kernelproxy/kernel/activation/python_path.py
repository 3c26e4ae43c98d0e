"""Our entries of PYTHONPATH, in a process with a session and in those that it starts.

Such a process starts with the directory of our packages in it (`paths.bundle_dir`), and removes it:
other programs must not find them. Instead its children find the directory ``children`` of this
package, whose module `sitecustomize` is small and finds our packages by itself.

Needs the standard library only.
"""

from __future__ import annotations

import os

from kernelproxy.kernel.activation import state

NAME = "PYTHONPATH"
#: Below the directory of our packages.
_CHILDREN = os.path.join("kernelproxy", "kernel", "activation", "children")


def replace(bundle: str, *, children: bool) -> None:
    """Replace our packages in this process's PYTHONPATH by what its children need of us.

    Parameters
    ----------
    bundle : str
        Directory of our packages.
    children : bool
        Whether child processes may have sessions.
    """
    kept = _entries(os.environ.get(NAME, ""), bundle)
    if children and state.children_have_sessions():
        kept.insert(0, os.path.join(bundle, _CHILDREN))
    _set(kept)


def users_part(text: str, bundle: str = "") -> str:
    """Return a value of PYTHONPATH without our entries; `bundle` as in `replace`."""
    return os.pathsep.join(_entries(text, bundle))


def set_users_part(text: str) -> None:
    """Set PYTHONPATH of this process to a value of its user; our entry stays in it."""
    present = os.environ.get(NAME, "").split(os.pathsep)
    _set([*filter(_is_for_children, present), *_entries(text, "")])


def _entries(text: str, bundle: str) -> list[str]:
    found = filter(None, text.split(os.pathsep))
    return [each for each in found if each != bundle and not _is_for_children(each)]


def _is_for_children(entry: str) -> bool:
    return entry.endswith(os.sep + _CHILDREN)


def _set(kept: list[str]) -> None:
    if kept:
        os.environ[NAME] = os.pathsep.join(kept)
    else:
        os.environ.pop(NAME, None)
