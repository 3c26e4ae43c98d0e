"""Worker's side of the operators that represent graphs (`native/worker/operators/graphs.cpp`).

Registered in the zygote, which is forked often: their imports are made at their first use.
"""

from __future__ import annotations

from typing import Any

_libraries: list[Any] = []


def register() -> None:
    """Implement the operators; called once, after the worker library was loaded."""
    import torch

    library: Any = torch.library.Library("sing", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("prepare_graph_here", _prepare, "CompositeExplicitAutograd")
    library.impl("run_graph_here", _run, "CompositeExplicitAutograd")
    _libraries.append(library)


def _prepare(graph: Any, digest: str) -> str:
    try:
        from kernelproxy.worker import graph_compile

        graph_compile.prepare(graph, digest)
    except BaseException as error:
        return _complaint(error)
    return ""


def _run(
    graph: Any, digest: str, changed: list[Any], inputs: list[Any], numbers: list[int]
) -> tuple[list[Any], str]:
    try:
        from kernelproxy.worker import graph_compile

        return graph_compile.run(graph, digest, changed, inputs, numbers), ""
    except BaseException as error:
        return [], _complaint(error)


def _complaint(error: BaseException) -> str:
    """Return the text that C++ raises instead; it recognizes memory errors by their name."""
    name = type(error).__name__
    return str(error) if type(error) is RuntimeError and str(error) else f"{name}: {error}"
