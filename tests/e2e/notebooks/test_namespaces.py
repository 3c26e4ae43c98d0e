"""The namespace of a real kernel, saved there, and restored in another kernel and in itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.e2e.kernels import SECONDS_MAX, Kernel

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PREPARE = f"""
import sys as _sys, pickle as _pickle
_sys.path.insert(0, {str(ROOT)!r})
from kernelproxy.kernel import ipython_state as _notebook
def _save(path):
    captured = _notebook.capture_notebook(get_ipython())
    with open(path, "wb") as file:
        _pickle.dump((captured.stream, [bytes(view) for view in captured.buffers]), file)
    print([item.name for item in captured.saved], [line.name for line in captured.omitted])
def _restore(path):
    with open(path, "rb") as file:
        restored = _notebook.restore_notebook(get_ipython(), *_pickle.load(file))
    print(restored.problems)
get_ipython().user_ns_hidden.update(
    {{name: globals()[name] for name in ("_sys", "_pickle", "_notebook", "_save", "_restore")}}
)
"""


@contextmanager
def plain_kernel() -> Iterator[Kernel]:
    """Start a kernel without a session."""
    manager, client = start_new_kernel(startup_timeout=SECONDS_MAX, kernel_name="python3")
    try:
        kernel = Kernel(manager, client)
        assert kernel.run(PREPARE).error_text == ""
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_kernel_is_restored_elsewhere_and_rolled_back(tmp_path: Path) -> None:
    path = str(tmp_path / "namespace")
    with plain_kernel() as first:
        first.run("import random\nrandom.seed(1)\ntotal = [1]\nsame = total\n'shown'")
        first.run("def add(n):\n    total.append(n)\n    return same is total, sum(total)")
        first.run("lines = (line for line in 'ab')")
        saved = first.run(f"_save({path!r})")
        assert saved.stdout.strip() == ("['random', 'total', 'same', 'add', 'Out[2]'] ['lines']"), (
            saved
        )
        expected = first.run("(add(5), random.random())").shown
        first.run("later = 1; del add; total = None")
        assert first.run(f"_restore({path!r})").stdout.strip() == "[]"
        assert first.run("(add(5), random.random())").shown == expected
        assert first.run("'later' in globals(), 'lines' in globals()").shown == ["(False, False)"]
    with plain_kernel() as second:
        assert second.run(f"_restore({path!r})").stdout.strip() == "[]"
        assert second.run("(add(5), random.random())").shown == expected
        assert second.run("Out[2], In[2].splitlines()[0]").shown == ["('shown', 'import random')"]
        second.run("same.append(1)")
        assert second.run("total, add.__globals__ is globals()").shown == ["([1, 5, 1], True)"]
