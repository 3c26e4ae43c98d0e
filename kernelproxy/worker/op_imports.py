"""Worker's side of operators that are not torch's: it imports the modules that define them.

`native/worker/operators/origins.cpp` calls this when a notebook's log defines such an operator, and
when a loaded snapshot contains one. The log is the user's own, and the worker has the user's
privileges; still, names and paths are validated here.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*", re.ASCII)
_libraries: list[Any] = []


def register() -> None:
    """Implement the operator that imports; called in the zygote, before workers are forked."""
    import torch

    library = torch.library.Library("sing", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("import_here", import_here, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def import_here(name: str, module: str, root: str, library: str) -> str:
    """Import an operator's origin; return why the operator does not exist then ("" if it does).

    Parameters
    ----------
    name : str
        Name of the operator, without its overload.
    module : str
        Module to import, or "".
    root : str
        Directory in which the notebook found the module; searched last.
    library : str
        Path of a shared library to load if the module does not define the operator, or "".
    """
    complaint = ""
    try:
        if module:
            complaint = _import(module, root)
            if not complaint and _exists(name):
                return ""
        if library:
            complaint = _load(library)
    except BaseException as error:  # no exception may reach the native caller
        return f"{type(error).__name__}: {error}"
    if complaint or _exists(name):
        return complaint
    return f"the worker imported {module or library}, which does not define it there"


def _import(module: str, root: str) -> str:
    if not _MODULE.fullmatch(module):
        return f"{module!r} is no name of a module"
    if os.path.isabs(root) and root not in sys.path:
        sys.path.append(root)
        importlib.invalidate_caches()
    try:
        importlib.import_module(module)
    except BaseException as error:
        return f"the worker cannot import module {module} ({type(error).__name__}: {error})"
    return ""


def _load(library: str) -> str:
    import torch

    if not os.path.isabs(library) or not os.path.isfile(library):
        return f"the worker cannot load {library}: there is no such file"
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the worker cannot load {library} ({error})"
    return ""


def _exists(name: str) -> bool:
    import torch

    return name in torch._C._dispatch_get_all_op_names() or any(
        known.startswith(name + ".") for known in torch._C._dispatch_get_all_op_names()
    )
