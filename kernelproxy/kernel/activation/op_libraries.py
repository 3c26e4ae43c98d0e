"""Origins of operators that are not torch's: what a worker must import to have them.

torch stores the file in which an operator was defined; for a compiled one this is the source file.
For operators that Python defines, the module is recorded here. A compiled one is found by the name
of its source, which its library contains.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import mmap
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Origin = tuple[str, str, str]

_modules: dict[str, str] = {}

#: Registered as the file of a kernel. Only kernels of Python files run in the notebook: see
#: `is_python` in native/client/ops/foreign.cpp.
_IN_WORKER = "the worker"


def install(library: ModuleType, ops: ModuleType, take_over: Callable[[], None]) -> None:
    """Record the module of every operator that `torch.library` defines from now on.

    Parameters
    ----------
    library, ops : module
        `torch.library` and `torch._ops`.
    take_over : callable
        Called before Python uses an operator for the first time.
    """
    _take_over_before_use(ops, take_over)
    _take_over_after_loading(take_over)
    define = library.Library.define

    def noting(self: Any, schema: str, *arguments: Any, **options: Any) -> Any:
        name = f"{self.ns}::{re.split(r'[.(]', schema, maxsplit=1)[0].strip()}"
        _modules[name] = _caller(sys._getframe(1))
        return define(self, schema, *arguments, **options)

    library.Library.define = noting
    _ship_backends(library)


def _ship_backends(library: ModuleType) -> None:
    """Send calls of a library's own CUDA kernels to the worker instead of running them here.

    A library that has kernels for the CPU and for CUDA, both in Python, chooses by device because
    its CUDA kernels do not use torch's operators: they pass addresses of tensors to libraries of
    their own. The worker imports the library and calls its kernel for the worker's device. If a
    library has kernels for CUDA only, they consist of torch's operators, as far as can be known,
    and run here.
    """
    impl = library.Library.impl
    on_host: set[str] = set()  # namespaces that have a kernel for the CPU
    here: dict[str, list[Callable[[], None]]] = {}  # kernels for CUDA of the others

    def registering(
        self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any
    ) -> Any:
        key = dispatch_key or self.dispatch_key
        if key not in ("CPU", "CUDA") or not _of_its_module(self.ns, op_name, sys._getframe(1)):
            return impl(self, op_name, fn, dispatch_key, **options)
        if key == "CPU":
            result = impl(self, op_name, fn, dispatch_key, **options)
            on_host.add(self.ns)
            for move in here.pop(self.ns, []):
                move()
            return result
        kernels, owner = _Kernels(self), weakref.ref(self)

        def register(place: str) -> None:
            found = owner()
            if found is None or found.m is None:
                return  # its operators were removed with it
            own, found.m = found.m, kernels.at(place)
            try:
                impl(found, op_name, fn, dispatch_key, **options)
            finally:
                found.m = own
            options["allow_override"] = True

        register(_IN_WORKER if self.ns in on_host else __file__)
        if self.ns not in on_host:
            here.setdefault(self.ns, []).append(lambda: register(_IN_WORKER))
        return None

    library.Library.impl = registering


class _Kernels:
    """Kernels of a library that can be replaced by others; they are destroyed with the library."""

    def __init__(self, library: Any) -> None:
        self._namespace = library.ns
        self._module: Any = None
        library._registration_handles.append(self)

    def at(self, place: str) -> Any:
        """Remove the current kernels; return what registers others, as from the file `place`."""
        import torch

        self.destroy()
        self._module = torch._C._dispatch_library("IMPL", self._namespace, "CUDA", place, 0)
        return self._module

    def destroy(self) -> None:
        """Called by torch when the library is destroyed."""
        if self._module is not None:
            self._module.reset()
            self._module = None


def _of_its_module(namespace: str, operator: Any, frame: FrameType | None) -> bool:
    """True if the package that registers a kernel can be imported, and defined the operator."""
    name = str(operator if isinstance(operator, str) else operator._schema.name)
    name = name.split("::")[-1].split(".")[0]
    module = _modules.get(f"{namespace}::{name}", "__main__")
    return module != "__main__" and _caller(frame).split(".")[0] == module.split(".")[0]


def _take_over_before_use(ops: ModuleType, take_over: Callable[[], None]) -> None:
    """Take over every operator before ``torch.ops.NAMESPACE.NAME`` returns it, in any thread.

    The interpreter's main thread takes over what a library has defined, but another thread may
    use it earlier. Namespaces look a name up once and cache it.
    """
    look_up = ops._OpNamespace.__getattr__

    def looking_up(self: Any, name: str) -> Any:
        take_over()
        return look_up(self, name)

    ops._OpNamespace.__getattr__ = looking_up


def _take_over_after_loading(take_over: Callable[[], None]) -> None:
    """Take over kernels of shared libraries as soon as Python has loaded them."""

    def loading(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            take_over()
            return result

        return load

    ctypes.CDLL.__init__ = loading(ctypes.CDLL.__init__)  # type: ignore[method-assign]
    loader = importlib.machinery.ExtensionFileLoader
    loader.exec_module = loading(loader.exec_module)  # type: ignore[method-assign]


def origin(name: str) -> Origin:
    """Return what a worker must import for an operator: a module, its directory, a shared library.

    Called by the native client at the operator's first use.

    Raises
    ------
    RuntimeError
        If it cannot be imported in another process.
    """
    if module := _modules.get(name):
        if module == "__main__":
            raise RuntimeError(
                "it is defined in the notebook, without a kernel for CUDA; register one for it "
                "that calls operators of torch, or define it in a module"
            )
        return module, _root(module), ""
    import torch

    described = torch._C._dispatch_dump(name)
    defined = re.search(r"^debug: registered at (.+):\d+$", described, re.MULTILINE)
    # Without a file, as by the old `torch::RegisterOperators`, the library contains the name.
    content = defined[1].encode() + b"\0" if defined else name.encode()
    library = _library_with(content, Path(torch.__file__).parent)
    module = _module_of(library) if library else ""
    return module, _root(module), library


def _caller(frame: FrameType | None) -> str:
    """Return the name of the module that called torch."""
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "__main__")
        top = name.split(".")[0]
        # Decorators call through the standard library (`functools.singledispatch`).
        if top != "torch" and top not in sys.stdlib_module_names and name != __name__:
            return name
        frame = frame.f_back
    return "__main__"


def _root(module: str) -> str:
    """Return the directory in which the import system found the package of a module."""
    found = sys.modules.get(module.split(".")[0])
    if found is None:
        return ""
    if paths := list(getattr(found, "__path__", [])):
        return os.path.dirname(os.path.abspath(str(paths[0])))
    file = getattr(found, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else ""


def _library_with(wanted: bytes, torch: Path) -> str:
    """Find the loaded library that contains certain bytes; "" if none does."""
    for path in _loaded(torch):
        try:
            with (
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                if content.find(wanted) >= 0:
                    return path
        except (OSError, ValueError):  # removed since it was loaded, or empty
            continue
    return ""


def _loaded(torch: Path) -> Iterator[str]:
    """Yield the shared libraries of this process that are neither torch's nor the system's."""
    seen = set()
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        others = ("/lib/", "/lib64/", "/usr/lib/", f"{torch}/", "/memfd:", "/dev/")
        if ".so" in path and path not in seen and not path.startswith(others):
            seen.add(path)
            yield path


def _module_of(library: str) -> str:
    """Return the module that loads a shared library: itself, or the package that contains it."""
    for name, module in list(sys.modules.items()):
        if "." not in name:
            if getattr(module, "__file__", None) == library:
                return name
            if any(
                library.startswith(os.path.abspath(path) + os.sep)
                for path in getattr(module, "__path__", [])
            ):
                return name
    return ""
