"""Saving and restoring the state of an IPython shell: its variables and its history."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kernelproxy.kernel.namespace.capture import capture
from kernelproxy.kernel.namespace.restore import Buffer, restore
from kernelproxy.kernel.namespace.types import Captured, DevicePart, Omission, RestoredNamespace
from kernelproxy.kernel.process_settings import (
    put_back_random_streams,
    put_back_settings,
    random_streams,
    settings,
)

#: Names under which IPython keeps results, unless the user has taken the name.
LAST = ("_", "__", "___")
#: Names that IPython itself hides; every shell has its own.
_OF_SHELL = {"get_ipython", "exit", "quit", "open", "_i", "_ii", "_iii", *LAST}
#: Extensions that belong to a kernel, and not to its notebook.
_OF_KERNEL = ("kernelproxy.", "jupyter_sing", "debugpy")
_HISTORY = re.compile(r"_(i|ii|iii|ih|oh|dh|exit_code|i?\d+)|In|Out")
_OF_MODULE = {
    "__builtin__", "__builtins__", "__doc__", "__file__", "__loader__", "__name__", "__package__",
    "__spec__", "__annotate__", "__conditional_annotations__",
    "__session__",  # path of the notebook, which the server sets in each kernel
}  # fmt: skip


def variables(shell: Any) -> list[str]:
    """Return the names of the user's variables: set neither by IPython nor by the module."""
    hidden, hook, nothing = shell.user_ns_hidden, shell.displayhook, object()
    return [
        name
        for name, value in shell.user_ns.items()
        if hidden.get(name, nothing) is not value
        and name not in _OF_MODULE
        and not _HISTORY.fullmatch(name)
        and not (name in LAST and getattr(hook, name, nothing) is value)
    ]


def hidden_variables(shell: Any) -> list[str]:
    """Return names that ``%pylab`` or start-up files have set, not the user."""
    hidden, nothing = shell.user_ns_hidden, object()
    return [
        name
        for name, value in shell.user_ns.items()
        if hidden.get(name, nothing) is value
        and name not in _OF_SHELL | _OF_MODULE
        and not _HISTORY.fullmatch(name)
    ]


def capture_notebook(shell: Any, device: DevicePart | None = None) -> Captured:
    """Save the variables of a shell, with its history, random streams and common settings.

    Parameters
    ----------
    shell : IPython.core.interactiveshell.InteractiveShell
        The shell; between two cells, or in a cell that calls this.
    device : DevicePart, optional
        The device session.

    Returns
    -------
    Captured
        See `capture`. Results of cells appear as ``Out[n]``.

    Raises
    ------
    KeyboardInterrupt
        If the user interrupts it; then nothing has been changed.
    """
    history = shell.history_manager
    names, hidden, hook = variables(shell), hidden_variables(shell), shell.displayhook
    extra: dict[str, object] = {f"Out[{n}]": value for n, value in shell.user_ns["_oh"].items()}
    extra |= {
        name: getattr(hook, name)
        for name in LAST
        if name not in names and not isinstance(getattr(hook, name, ""), str)
    }
    if logging.root.handlers:
        extra["logging.root"] = logging.root
    extra["the shell"] = {
        "In": list(history.input_hist_parsed),
        "raw": list(history.input_hist_raw),
        "execution_count": shell.execution_count,
        "hidden": hidden,
        "extensions": [
            name
            for name in sorted(shell.extension_manager.loaded)
            if not name.startswith(_OF_KERNEL)
        ],
    }
    extra["settings"] = settings()
    extra["random numbers"] = random_streams(device)
    captured = capture(shell.user_ns, device, names=[*names, *hidden], extra=extra)
    internal = {"the shell", "settings", "random numbers", "logging.root", *LAST, *hidden}
    captured.saved = [item for item in captured.saved if item.name not in internal]
    captured.omitted = [
        line for line in captured.omitted if line.name not in extra or line.name not in LAST
    ]
    return captured


def restore_notebook(
    shell: Any, stream: bytes, buffers: Sequence[Buffer], device: DevicePart | None = None
) -> RestoredNamespace:
    """Restore the state of a shell, from another one or from itself.

    Runs code that the stream contains. Variables that were not saved are removed, so that all
    variables are from the same time.

    Parameters
    ----------
    shell : IPython.core.interactiveshell.InteractiveShell
        The shell.
    stream, buffers : bytes, sequence of bytes-like
        What `capture_notebook` returned.
    device : DevicePart, optional
        The device session, with the content of the storages.

    Returns
    -------
    Restored
        Variables, which are in the shell now, and the problems with some of them.

    Raises
    ------
    StoreError
        If the stream is not valid; the shell is unchanged then.
    """
    restored = restore(stream, buffers, device, into=shell.user_ns, instead_of=variables(shell))
    extra = restored.extra
    if (state := extra.get("the shell")) is not None:
        _restore_shell(shell, state, extra)
        restored.problems += _load_extensions(shell, state["extensions"])
    if (found := extra.get("settings")) is not None:
        restored.problems += put_back_settings(found)
    if (streams := extra.get("random numbers")) is not None:
        restored.problems += put_back_random_streams(streams, device)
    return restored


def _restore_shell(shell: Any, state: dict[str, Any], extra: dict[str, Any]) -> None:
    history, user_ns = shell.history_manager, shell.user_ns
    for name in [name for name in user_ns if re.fullmatch(r"_i?\d+", name)]:
        del user_ns[name]
    # The database numbers lines within a session, and these numbers repeat.
    history.reset(new_session=True)
    history.input_hist_parsed[:] = state["In"]
    history.input_hist_raw[:] = state["raw"]
    shell.execution_count = state["execution_count"]
    for name, value in extra.items():
        if number := re.fullmatch(r"Out\[(\d+)\]", name):
            user_ns["_oh"][int(number[1])] = user_ns[f"_{number[1]}"] = value
    for name in LAST:
        if name in extra:
            user_ns[name] = extra[name]
            setattr(shell.displayhook, name, extra[name])
    user_ns |= {f"_i{line}": text for line, text in enumerate(state["raw"]) if line}
    shell.user_ns_hidden.update(
        {name: user_ns[name] for name in state["hidden"] if name in user_ns}
    )


def _load_extensions(shell: Any, names: Sequence[str]) -> Iterator[Omission]:
    """Load the IPython extensions that cells had loaded, for their magics."""
    for name in names:
        if name not in shell.extension_manager.loaded:
            try:
                shell.extension_manager.load_extension(name)
            except Exception as error:
                yield Omission(f"%load_ext {name}", f"{type(error).__name__}: {error}")
