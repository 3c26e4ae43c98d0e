"""Progress shown in a cell while the native part is compiled, for which the cell waits."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from kernelproxy.native.libraries import Compiling, printer


class Shown:
    """Progress of a compilation: in a notebook as a bar, elsewhere on standard error.

    Use it as a context manager, and as the callback of `kernelproxy.native.ensure`.
    """

    def __init__(self) -> None:
        self._last: Compiling | None = None
        self._output: Any = None
        self._print = printer(sys.stderr)

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._output is not None and self._last is not None:
            how = "could not be compiled" if kind else "was compiled, once for all notebooks"
            what = self._last.what
            text = f"{what} {how}."
            self._output.update({"text/plain": text[0].upper() + text[1:]}, raw=True)

    def __call__(self, compiling: Compiling) -> None:
        """Show this progress instead of the previous one."""
        self._last = compiling
        if _in_notebook():
            self._show(compiling)
        else:
            self._print(compiling)

    def _show(self, compiling: Compiling) -> None:
        from IPython.display import display

        text = f"{compiling}."
        far = f'value="{compiling.done}" max="{compiling.total}" ' if compiling.total else ""
        bar = f'<progress {far}aria-label="{text}"></progress> {text}'
        data = {"text/plain": text, "text/html": bar}
        if self._output is None:
            self._output = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._output.update(data, raw=True)


def _in_notebook() -> bool:
    """True if this is a kernel with a Jupyter front end."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
