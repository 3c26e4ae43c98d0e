"""Run notebooks in IPython shells, save them, restore them: one step for each process.

    namespaces.py save MODULES DIRECTORY      prints JSON: for each notebook its output and names
    namespaces.py restore MODULES DIRECTORY   prints JSON: for each notebook its output and problems

MODULES are some of tests.namespaces, with commas between them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import pickle
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from kernelproxy.kernel.ipython_state import capture_notebook, restore_notebook
from kernelproxy.kernel.namespace import Omission


def new_shell() -> InteractiveShell:
    """Return a shell with a module of its own, like that of a new kernel."""
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    module = types.ModuleType("__main__")
    return InteractiveShell.instance(user_module=module, user_ns=vars(module), config=config)


def run(shell: InteractiveShell, source: str) -> str:
    """Run cells; return their output and errors."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for cell in textwrap.dedent(source).split("# %%\n"):
            result = shell.run_cell(cell.strip(), store_history=True)
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                print(f"FAILED {type(error).__name__}: {error}")
    return out.getvalue()


def save(notebook: Any, file: Path) -> dict[str, Any]:
    """Run a notebook, save it to a file, and run its check."""
    shell = new_shell()
    ran = run(shell, notebook.source)
    captured = capture_notebook(shell)
    file.write_bytes(pickle.dumps((captured.stream, [bytes(view) for view in captured.buffers])))
    return {
        "ran": ran,
        "omitted": {o.name: o.why for o in captured.omitted if not o.partly},
        "partly": {o.name: o.why for o in captured.omitted if o.partly},
        "saved": [item.name for item in captured.saved],
        "output": run(shell, notebook.check),
    }


def restore(notebook: Any, file: Path) -> dict[str, Any]:
    """Restore a notebook from a file into a new shell, run its check, and do both once more."""
    shell = new_shell()
    stream, buffers = pickle.loads(file.read_bytes())
    restored = restore_notebook(shell, stream, buffers)
    output = run(shell, notebook.check)
    run(shell, "later = 1")
    again = restore_notebook(shell, stream, buffers)
    problems = restored.problems + again.problems
    if "later" in shell.user_ns:
        problems.append(Omission("later", "a variable from after the checkpoint is still there"))
    return {
        "problems": {problem.name: problem.why for problem in problems},
        "output": output,
        "rolled_back": run(shell, notebook.check),
    }


def main() -> None:
    """Do one step for all notebooks of some modules."""
    step, modules, place = sys.argv[1:]
    os.environ["MPLBACKEND"] = "agg"
    notebooks = [
        notebook
        for module in modules.split(",")
        for notebook in importlib.import_module(f"tests.namespaces.{module}").NOTEBOOKS
    ]
    act = {"save": save, "restore": restore}[step]
    answers = {}
    for notebook in notebooks:
        os.chdir(place)
        answers[notebook.name] = act(notebook, Path(place) / f"{notebook.name}.namespace")
    print(json.dumps(answers))
    sys.stdout.flush()
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    os._exit(0)  # threads that notebooks have left do not matter


if __name__ == "__main__":
    main()
