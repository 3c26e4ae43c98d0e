"""Import hook: joins the session when torch is imported.

Two imports are watched. ``torch``: before its module executes, the native client is loaded and the
session joined, or the way to open one prepared (`session_join`), because torch latches its device
hooks during its initialisation. ``torch._C``: after it executed and before ``torch`` uses it, it
gets the names that builds without CUDA lack (`torch_c_names`), so that ``torch.cuda`` finds them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from kernelproxy.common.errors import NativeError, SingError
from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.activation import inductor_backend, launchers, op_libraries, session_join
from kernelproxy.kernel.activation.jobs import job_report
from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.kernel.activation.state import (
    HIDDEN,
    Activation,
    children_have_sessions,
    explain,
    joined,
)
from kernelproxy.kernel.torch_cuda import (
    dtensor_random,
    patches,
    python_kernels,
    torch_c_names,
)
from kernelproxy.native import build

#: First version of torch that lets us guard the addresses of tensors.
_GUARDED = (2, 13)


class TorchFinder(MetaPathFinder):
    """Wraps the execution of ``torch`` and ``torch._C``; removes itself once torch is imported."""

    def __init__(self, state: Activation) -> None:
        self._state = state

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system for every module that is not imported yet."""
        if fullname not in ("torch", "torch._C"):
            return None
        if self._state.child and not children_have_sessions():
            return None
        spec = _find(self, fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        if fullname == "torch":
            _wrap(spec, lambda execute, module: self._import_torch(spec, execute, module))
        elif self._state.client is not None:
            _wrap(spec, self._import_bindings)
        return spec

    def _import_torch(
        self, spec: ModuleSpec, execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        """Called by the import system to execute the module ``torch``."""
        if self._state.client is None:
            self._join(spec)
            if self._state.client is not None:
                _install(lambda: python_kernels.install(watch))
                _install(lambda: dtensor_random.install(watch))
                if children_have_sessions():
                    _install(lambda: launchers.install(watch))
                _install(lambda: job_report.install(watch))
        execute(module)
        sys.meta_path.remove(self)
        if self._state.client is not None:
            _install(self._client().keep_autograd_single_threaded)
            _install(lambda: patches.install(module, self._client()))
            take_over = self._client().take_over_operators
            _install(lambda: op_libraries.install(module.library, module._ops, take_over))
            watch("torch._inductor.compile_fx", inductor_backend.install)

    def _import_bindings(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Called by the import system to execute the extension module ``torch._C``."""
        execute(module)
        _install(lambda: torch_c_names.install(module, self._client()))

    def _client(self) -> NativeClient:
        if self._state.client is None:
            raise NativeError("the session was not joined")
        return self._state.client

    def _join(self, spec: ModuleSpec) -> None:
        """Join the session or print why not; never raises."""
        if not self._state.reason and gpu_access.hides_all(os.environ):
            self._state.reason = HIDDEN  # by a cell
        if self._state.reason:
            explain(self._state.reason)
            return
        if not gpu_access.is_direct():
            gpu_access.hide()
        try:
            self._load(spec)
        except (SingError, OSError) as error:
            explain(str(error).rstrip("."))
        except Exception as error:
            # A bug of ours must not prevent the user's import of torch.
            explain(f"internal error, please report it: {type(error).__name__}: {error}")

    def _load(self, spec: ModuleSpec) -> None:
        """Load the client, and join the session if this process is the one it was opened for.

        Raises
        ------
        SingError
            If that is not possible; torch stays unchanged then.
        """
        if not spec.origin:
            raise NativeError("torch has no directory")
        torch = build.describe(Path(spec.origin).parent)
        _check_direct_gpu(torch.short)
        joining = session_join.prepare(torch)
        if not self._state.child:
            joining.join(self._state.session)
        client = joining.client
        client.register()
        if children_have_sessions():
            client.on_first_use(joining.open)
        if self._state.child:
            self._state.client = client
        else:
            joined(client)


class LaterFinder(MetaPathFinder):
    """Calls a function after the import of a module, then removes itself.

    Parameters
    ----------
    name : str
        Name of the module.
    then : callable
        Function, called with the module.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system for every module that is not imported yet."""
        if fullname != self._name:
            return None
        spec = _find(self, fullname, path, target)
        if spec is not None and spec.loader is not None:
            _wrap(spec, self._import)
        return spec

    def _import(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        if self in sys.meta_path:  # other finders may have called `find_spec` without importing
            sys.meta_path.remove(self)
            self._then(module)


def watch(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or after its import."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, LaterFinder(name, then))


def _find(
    asking: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Find a module's spec with the other finders."""
    for finder in sys.meta_path:
        if finder is not asking:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


def _wrap(
    spec: ModuleSpec, around: Callable[[Callable[[ModuleType], None], ModuleType], None]
) -> None:
    """Run `around` in place of the loader's ``exec_module``, once; the loader keeps its type."""
    loader = spec.loader
    execute = loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):
            del loader.exec_module  # type: ignore[union-attr]
        around(execute, module)

    loader.exec_module = exec_module  # type: ignore[method-assign, union-attr]


def _install(step: Callable[[], None]) -> None:
    """Perform a step of the installation; if it fails, say so and leave torch without a device."""
    try:
        step()
    except Exception as error:
        torch_c_names.withdraw()
        explain(f"this torch could not be adapted: {type(error).__name__}: {error}")


def _check_direct_gpu(version: str) -> None:
    """Hide the GPU after all if torch cannot stop code that reads the session's addresses.

    Without that hook (Note [Guarded storages] in native/client/ops/tensors.cpp), an extension that
    starts a kernel on such an address, and checks no error, would leave wrong numbers.
    """
    if not gpu_access.is_direct() or tuple(map(int, version.split("."))) >= _GUARDED:
        return
    gpu_access.withdraw()
    print(
        f"jupyter_sing: direct use of the GPU is off: with torch {version}, other libraries could "
        "compute wrong numbers from its tensors. It needs torch 2.13.",
        file=sys.stderr,
    )
