"""Gives processes that a notebook or a program has started sessions of their own, if they need one.

The directory of this module is in PYTHONPATH of such processes, so that Python imports it when it
starts; then it imports the module of this name that Python would have found without it. It may be
imported by any Python, with or without torch. So it costs little, and does nothing more until torch
is imported. A process opens its session at its first use of the device: see `child_session`.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost more than all of this

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
#: The directory of our packages.
_BUNDLE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
#: As `kernelproxy.provisioning.provisioner`.
_PYTHON_MIN = (3, 11)


def _is_wanted() -> bool:
    """Return True if this process is a child of one with a session, and not its kernel itself."""
    env = os.environ
    client = env.get("SING_CLIENT", "")
    is_child = client not in ("", str(os.getpid())) and bool(env.get("SING_SOCKET"))
    return is_child and env.get("SING_CHILDREN") != "0" and sys.version_info >= _PYTHON_MIN


class _TorchWatch:
    """Import hook that activates this process when it looks for torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for each module that is imported for the first time."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        _activate()
        from importlib.util import find_spec

        return find_spec(name)


def _activate() -> None:
    """Activate our import hook, which then finds torch; a failure leaves torch as it is."""
    sys.path.insert(0, _BUNDLE)
    try:
        _forget_another_version()
        from kernelproxy.kernel.activation import activate_child

        activate_child()
    except Exception as error:
        print(f"jupyter_sing: CPU only: {type(error).__name__}: {error}.", file=sys.stderr)
    finally:
        sys.path.remove(_BUNDLE)


def _forget_another_version() -> None:
    """Forget our packages of another installation, which its `.pth` file has imported."""
    known = sys.modules.get("kernelproxy")
    ours = os.path.join(_BUNDLE, "kernelproxy")
    if known is None or any(os.path.samefile(each, ours) for each in known.__path__):
        return
    for name in [each for each in sys.modules if each.partition(".")[0] == "kernelproxy"]:
        del sys.modules[name]


def _end_with_launcher() -> None:
    """Have a rank of ``jupyter sing run`` killed when the process that started it ends.

    That process ends its ranks by itself, unless it is killed; then they would wait for each other.
    """
    if os.environ.get("SING_LAUNCHER") == str(os.getppid()):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _leave() -> None:
    """Import the next module of this name instead of this one; its errors are its own."""
    sys.path[:] = [each for each in sys.path if each != _HERE]
    this = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if this is None or error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


if _is_wanted():
    _end_with_launcher()
    sys.meta_path.insert(0, _TorchWatch())
_leave()
