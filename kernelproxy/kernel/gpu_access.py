"""GPU access of processes with a session: they have none, because only workers use GPUs.

Two measures, for the process and its children:

- ``CUDA_VISIBLE_DEVICES`` is -1, so that CUDA finds no device. ``os.environ`` keeps the value that
  users see and set.
- The library that is preloaded into kernels does not open the files of GPUs
  (native/fstrack/gpu_files.h), whatever ``CUDA_VISIBLE_DEVICES`` is.

With the option `kernelproxy.common.options.DIRECT_GPU` neither is done.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Files that the preloaded library does not open: beginnings of their paths.
FILES_VARIABLE = "SING_GPU_FILES"
FILES = "/dev/nvidia:/dev/dxg"
#: Set in processes that may use GPUs directly, beside their session.
DIRECT_VARIABLE = "SING_DIRECT_GPU"
_NONE = "-1"
#: The value of `VISIBLE` before `hide`; empty: it was not set.
_BEFORE_VARIABLE = "SING_VISIBLE_DEVICES"


def hide() -> None:
    """Hide all GPUs from CUDA in this process and its children, whatever `os.environ` says."""
    if not hides_all(os.environ):
        os.putenv(_BEFORE_VARIABLE, os.environ.get(VISIBLE, ""))
    os.putenv(VISIBLE, _NONE)


def hide_again() -> None:
    """Hide all GPUs, also in a child of a process that has hidden them.

    Then `os.environ` has the user's value again.
    """
    before = os.environ.pop(_BEFORE_VARIABLE, None)
    if before is not None and os.environ.get(VISIBLE) == _NONE:
        if before:
            os.environ[VISIBLE] = before
        else:
            del os.environ[VISIBLE]
    hide()


def withdraw() -> None:
    """Hide the GPUs in a process that may use them directly, and from its children."""
    os.environ.pop(DIRECT_VARIABLE, None)
    hide()


def hide_in(env: MutableMapping[str, str]) -> None:
    """Hide all GPUs from a process that is started with an environment."""
    if not hides_all(env):
        env[_BEFORE_VARIABLE] = env.get(VISIBLE, "")
        env[VISIBLE] = _NONE


def restore(env: MutableMapping[str, str]) -> None:
    """Undo this in an environment that may be inherited from a process with a session."""
    for name in (FILES_VARIABLE, DIRECT_VARIABLE):
        env.pop(name, None)
    before = env.pop(_BEFORE_VARIABLE, None)
    if before is None or env.get(VISIBLE) != _NONE:
        return
    if before:
        env[VISIBLE] = before
    else:
        del env[VISIBLE]


def hides_all(env: MutableMapping[str, str]) -> bool:
    """True if `VISIBLE` hides all GPUs."""
    return env.get(VISIBLE, "0").strip() in ("", _NONE)


def is_direct() -> bool:
    """True if this process may use GPUs directly."""
    return bool(os.environ.get(DIRECT_VARIABLE))
