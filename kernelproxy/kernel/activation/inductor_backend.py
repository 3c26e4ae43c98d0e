"""``torch.compile`` on a proxied device: inductor's graphs are compiled by the worker.

Dynamo and autograd run here, with inductor's decompositions, passes and partitioner, as without a
proxy. The graph of aten operators, which inductor would then compile for a device of this process,
is described (`graph_export`), written to the device's memory, and compiled by the worker.
Each call of it is one record.

A graph that cannot be shipped or compiled runs eagerly, operator by operator, as the program was
written; one line says so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

#: Part of the errors of the compiling operator (client/log/errors.cpp).
_WHILE_COMPILING = " [sing::prepare_graph"
_reported = False


def install(module: ModuleType) -> None:
    """Patch ``torch._inductor.compile_fx``; called by the import hook after its import."""
    import torch

    original = module.compile_fx
    default = module.compile_fx_inner

    @functools.wraps(original)
    def compile_fx(
        model: Any, inputs: Sequence[Any], inner_compile: Any = default, **options: Any
    ) -> Any:
        from torch._inductor.virtualized import V

        ours = inner_compile is default and not V.aot_compilation and _uses_device(model, inputs)
        if not ours:
            return original(model, inputs, inner_compile, **options)
        return _compile(torch, original, model, inputs, options)

    module.compile_fx = compile_fx  # type: ignore[attr-defined]


def _uses_device(model: Any, inputs: Sequence[Any]) -> bool:
    """True if a graph of dynamo's uses the device."""
    import torch

    def on_device(value: Any) -> bool:
        if isinstance(value, torch.device):
            return value.type == "cuda"
        if isinstance(value, str):
            return value == "cuda" or value.startswith("cuda:")
        return isinstance(value, torch.Tensor) and value.device.type == "cuda"

    if any(on_device(value) for value in inputs):
        return True
    if not isinstance(model, torch.fx.GraphModule):
        return False
    return any(
        on_device(node.meta.get("example_value"))
        or any(on_device(value) for value in (*node.args, *node.kwargs.values()))
        for node in model.graph.nodes
    )


def _compile(
    torch: ModuleType,
    original: Callable[..., Any],
    model: Any,
    inputs: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Compile a graph of dynamo's; a graph that cannot be compiled runs as it is."""
    from kernelproxy.common.graph_format import UnsupportedGraphError

    patches = dict(options.pop("config_patches", None) or {})
    # The pool of compiler processes is of no use here.
    inductor = {**patches, "compile_threads": 1}
    kept = _copied(torch, model)
    try:
        with (
            torch._inductor.config.patch(inductor),
            # AOT autograd's cache holds programs that were compiled for local devices. The backward
            # graph is compiled now, while the whole can still run eagerly instead.
            torch._functorch.config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            ),
        ):
            return original(model, inputs, functools.partial(_ship, torch), **options)
    except UnsupportedGraphError as error:
        _report(str(error))
    except Exception as error:
        # Also if the worker has died of it repeatedly.
        if _WHILE_COMPILING not in str(error):
            raise
        _report(str(error).partition(_WHILE_COMPILING)[0])
    return kept


def _copied(torch: ModuleType, model: Any) -> Any:
    """Return a copy of dynamo's graph: compiling the original may change it."""
    if not isinstance(model, torch.fx.GraphModule):
        return model
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    return torch.fx.GraphModule(model, graph)


def _report(reason: str) -> None:
    """Print once per process that a graph runs without being compiled."""
    global _reported
    if not _reported:
        _reported = True
        print(
            f"jupyter_sing: torch.compile: a graph is not compiled and runs eagerly: {reason}. "
            "This is said once.",
            file=sys.stderr,
        )


def _ship(torch: ModuleType, module: Any, examples: Sequence[Any], **options: Any) -> Any:
    """Replace ``compile_fx_inner``: ship a graph of aten operators to the device.

    Raises
    ------
    UnsupportedGraphError
        If it contains something that cannot be shipped.
    RuntimeError
        If the worker cannot compile it.
    """
    from kernelproxy.common import graph_format
    from kernelproxy.kernel.graph_export import describe

    config = torch._inductor.config
    settings = {
        name: getattr(config, name) for name in graph_format.SETTINGS if hasattr(config, name)
    }
    wanted = {
        "is_inference": bool(options.get("is_inference")),
        "is_backward": bool(options.get("is_backward")),
        "settings": {
            name: value for name, value in settings.items() if isinstance(value, (bool, int))
        },
    }
    with _outside_of_tracing(torch):
        described = describe(module, wanted)
    if all(node.op in ("placeholder", "output") for node in module.graph.nodes):
        return _boxed(module.forward)
    digest = graph_format.digest(described.data)
    with _outside_of_tracing(torch):
        host = torch.frombuffer(bytearray(described.data), dtype=torch.uint8)
        graph = host.to("cuda")
        torch.ops.sing.prepare_graph(graph, digest)
        constants = [constant.detach() for constant in described.constants]
    return Shipped(torch, graph, digest, described, constants)


@contextlib.contextmanager
def _outside_of_tracing(torch: ModuleType) -> Iterator[None]:
    """Execute operators on the device instead of tracing them."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function take its arguments as a list, as AOT autograd calls compiled graphs."""

    def boxed(arguments: list[Any]) -> Any:
        taken = list(arguments)
        arguments.clear()
        return function(*taken)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


class Shipped:
    """Graph on the device.

    Parameters
    ----------
    torch : module
    graph : torch.Tensor
        Bytes of the description, on the device.
    digest : str
        Name of these bytes.
    described : Description
    constants : list of torch.Tensor
        Further inputs.
    """

    def __init__(
        self,
        torch: ModuleType,
        graph: Any,
        digest: str,
        described: Any,
        constants: list[Any],
    ) -> None:
        self._boxed_call = True  # takes its arguments as a list; wrappers copy it from the instance
        self._run = torch.ops.sing.run_graph.default
        self._graph, self._digest, self._constants = graph, digest, constants
        kinds = [each.kind for each in described.inputs]
        self._changed = [i for i, kind in enumerate(kinds) if kind == "changed"]
        self._inputs = [i for i, kind in enumerate(kinds) if kind in ("tensor", "host")]
        self._host = [i for i, kind in enumerate(kinds) if kind == "host"]
        self._numbers = [i for i, kind in enumerate(kinds) if kind == "number"]
        self._outputs = [(each.kind, each.value) for each in described.outputs]
        self._returns_results = all(kind == "tensor" for kind, _ in self._outputs) and [
            value for _, value in self._outputs
        ] == list(range(len(self._outputs)))
        calculates = any(kind == "number" for kind, _ in self._outputs)
        self._symbols = list(described.symbols.values()) if calculates else []

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        """Run the graph; called by the code that AOT autograd generated."""
        given = list(arguments)
        arguments.clear()
        for index in self._host:
            given[index] = given[index].to("cuda")
        results = self._run(
            self._graph,
            self._digest,
            [given[index] for index in self._changed],
            [*(given[index] for index in self._inputs), *self._constants],
            [given[index] for index in self._numbers],
        )
        if self._returns_results:
            return results  # type: ignore[no-any-return]
        values = [
            given[index] if axis < 0 else given[index].size(axis) for index, axis in self._symbols
        ]
        return [self._output(kind, value, given, results, values) for kind, value in self._outputs]

    @staticmethod
    def _output(
        kind: str, value: Any, given: list[Any], results: list[Any], values: list[int]
    ) -> Any:
        if kind == "tensor":
            return results[value]
        if kind == "input":
            return given[value]
        if kind == "number":
            return value(*values)
        if kind == "host":
            return results[value].cpu()
        return value
