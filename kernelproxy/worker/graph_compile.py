"""Compilation of graphs for the worker's device, and their execution.

The code depends only on the graph and the numbers of the call: any worker that executes a call runs
the same code, whatever it has executed before. So the sizes for which code is compiled are part of
the graph. A call for which this code is not valid gets its own code, compiled for the call's sizes.
Nothing is tuned by measurements.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import Any

import torch

from kernelproxy.common import graph_format, paths
from kernelproxy.common.graph_format import DescriptionError
from kernelproxy.worker.graph_import import Geometry, ImportedGraph, Reference, rebuild

#: Limit of the geometries that a graph caches.
_KNOWN_MAX = 4096
_STACK_BYTES = 64 << 20

_graphs: dict[str, CompiledGraph] = {}

SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *sizes: sum(sizes),
    "Mul": lambda *sizes: reduce(operator.mul, sizes),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "Max": lambda *sizes: reduce(torch.sym_max, sizes),
    "Min": lambda *sizes: reduce(torch.sym_min, sizes),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda size, by: -(-size // by),
    "ModularIndexing": lambda size, by, modulus: size // by % modulus,
}


def prepare(graph: torch.Tensor, digest: str) -> None:
    """Compile a graph, unless it is compiled already."""
    find(graph, digest)


def run(
    graph: torch.Tensor,
    digest: str,
    changed: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[int],
) -> list[torch.Tensor]:
    """Run a graph on its inputs."""
    return find(graph, digest).run(changed, inputs, numbers)


def find(graph: torch.Tensor, digest: str) -> CompiledGraph:
    """Return the compiled graph whose description is in a tensor of bytes.

    Raises
    ------
    RuntimeError
        If it cannot be compiled.
    """
    known = _graphs.get(digest)
    if known is None:
        try:
            known = _graphs[digest] = CompiledGraph(_bytes_of(graph), digest, graph.device)
        except Exception as error:
            raise RuntimeError(f"the graph cannot be compiled ({_first_line(error)})") from error
    return known


class CompiledGraph:
    """Graph with its code.

    Parameters
    ----------
    data : bytes
        Description of the graph.
    digest : str
        Expected digest of the description.
    device : torch.device

    Raises
    ------
    DescriptionError
        If it is not a description, or has another digest.
    Exception
        If it cannot be compiled.
    """

    def __init__(self, data: bytes, digest: str, device: torch.device) -> None:
        if graph_format.digest(data) != digest:
            raise DescriptionError("the description of a graph is another one than is meant")
        import_module(
            "torch._inductor.inductor_prims"
        )  # operators of its own, which graphs may have
        self._digest, self._device = digest, device
        self._graph = rebuild(data, device)
        self._names = [symbol[0] for symbol in self._graph.symbols]
        self._sources = _sources(self._graph)
        self._variants: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._known: dict[tuple[int, ...], tuple[Callable[..., Any], list[Any]]] = {}
        hints = tuple(symbol[1] for symbol in self._graph.symbols)
        self._code, self._guard = self._compile(hints)

    def run(
        self,
        changed: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[int],
    ) -> list[torch.Tensor]:
        """Run the graph.

        Raises
        ------
        DescriptionError
            If the arguments do not match the graph's inputs.
        """
        arguments = self._arguments(changed, inputs, numbers)
        values = tuple(
            arguments[index] if axis < 0 else arguments[index].size(axis)
            for index, axis in self._sources
        )
        known = self._known.get(values)
        if known is None:
            known = self._choose(values)
        code, expected = known
        for index, (argument, geometry) in enumerate(zip(arguments, expected, strict=True)):
            if geometry is not None:
                arguments[index] = _fit(argument, *geometry)
            elif not isinstance(argument, int):
                raise DescriptionError("a graph was given a tensor for a number")
        results = list(code(arguments))
        return [
            result if result.device == self._device else result.to(self._device)
            for result in results
        ]

    def _arguments(
        self,
        changed: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        numbers: Sequence[int],
    ) -> list[Any]:
        """Return the inputs in the graph's order."""
        written, read, integers = iter(changed), iter(inputs), iter(numbers)
        arguments: list[Any] = []
        try:
            for each in self._graph.inputs:
                if not isinstance(each, Geometry):
                    arguments.append(next(integers))
                elif each.changed:
                    arguments.append(next(written))
                else:
                    tensor = next(read)
                    if tensor.dim() != len(each.size):
                        raise DescriptionError("a graph was given a tensor of other dimensions")
                    arguments.append(tensor.cpu() if each.place == "host" else tensor)
        except StopIteration:
            raise DescriptionError("a graph was given too few inputs") from None
        if len(arguments) != len(changed) + len(inputs) + len(numbers):
            raise DescriptionError("a graph was given too many inputs")
        return arguments

    def _choose(self, values: tuple[int, ...]) -> tuple[Callable[..., Any], list[Any]]:
        """Return the code for these values of the symbols, and the layout that it expects."""
        named = dict(zip(self._names, values, strict=True))
        code = self._code
        if not self._guard(values):
            if values not in self._variants:
                self._variants[values], good = self._compile(values)
                if not good(values):
                    raise RuntimeError("code is not good for the sizes that it was made for")
            code = self._variants[values]
        expected: list[Any] = []
        for each in self._graph.inputs:
            if not isinstance(each, Geometry):
                expected.append(None)
                continue
            size = tuple(_evaluate(size, named) for size in each.size)
            stride = tuple(_evaluate(stride, named) for stride in each.stride)
            expected.append((each.dtype, size, stride, each.changed))
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[values] = code, expected
        return code, expected

    def _compile(
        self, hints: tuple[int, ...]
    ) -> tuple[Callable[..., Any], Callable[[tuple[int, ...]], bool]]:
        """Compile for sizes, in a new thread: this thread's state must not affect it."""
        found: list[Any] = []
        threads = torch.get_num_threads()

        def work() -> None:
            try:
                torch.set_num_threads(threads)
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                tag = f"{self._digest} {hints}"
                found.append(_compile(self._graph, hints, self._device, tag))
            except BaseException as error:
                found.append(error)

        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=work)
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]  # type: ignore[no-any-return]


def _compile(
    graph: ImportedGraph, hints: tuple[int, ...], device: torch.device, tag: str
) -> tuple[Callable[..., Any], Callable[[tuple[int, ...]], bool]]:
    """Compile a graph for sizes; return the code, and a check of the values of symbols."""
    _set_cache_directory()
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.compiler import config as compiler_config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbols = _symbols(env, graph, hints)
    with mode:
        examples = [_example(each, symbols, device) for each in graph.inputs]
    module = _module(graph)
    settings: dict[str, Any] = {
        "compile_threads": 1,  # no other processes
        "fx_graph_remote_cache": False,
        "max_autotune": False,
        "max_autotune_gemm": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
        "triton.cudagraphs": False,
        **graph.settings,
    }
    if device.type == "cuda" and hasattr(config, "deterministic"):
        settings["deterministic"] = True
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        config.patch(settings),
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
        # The generators are the session's; compiling must not change their state.
        torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []),
    ):
        code = compile_fx_inner(
            module,
            examples,
            cudagraphs=BoxedBool(False),
            is_backward=graph.is_backward,
            is_inference=graph.is_inference,
        )
    if not symbols:
        return code, lambda values: True
    guards = env.produce_guards_expression(list(symbols.values()))
    if guards is None:
        return code, lambda values: True
    return code, lambda values: bool(env.evaluate_guards_expression(guards, values))


def _set_cache_directory() -> None:
    """Keep code where only this user can write; torch's default directory is shared."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(paths.cache_dir("inductor"))


def _symbols(env: Any, graph: ImportedGraph, hints: tuple[int, ...]) -> dict[str, Any]:
    """Make the symbols of a graph, as integers of `env`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    made = {}
    for (name, _, least, most, positive), hint in zip(graph.symbols, hints, strict=True):
        source = ConstantSource(f"graph_{name}")
        symbol = env.create_symbol(
            hint,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if positive else None,
            do_not_specialize_zero_one=True,
        )
        env.var_to_range[symbol] = ValueRanges(
            -int_oo if least is None else least, int_oo if most is None else most
        )
        made[name] = env.create_symintnode(symbol, hint=hint, source=source)
    return made


def _example(each: Any, symbols: dict[str, Any], device: torch.device) -> Any:
    """Return an example of an input, without memory."""
    if not isinstance(each, Geometry):
        return _evaluate(each, symbols)
    size = [_evaluate(size, symbols) for size in each.size]
    stride = [_evaluate(stride, symbols) for stride in each.stride]
    place = device if each.place == "device" else torch.device("cpu")
    return torch.empty_strided(size, stride, dtype=each.dtype, device=place)


def _module(graph: ImportedGraph) -> torch.fx.GraphModule:
    """Return the graph as a graph of torch.fx."""
    made = torch.fx.Graph()
    root = torch.nn.Module()
    nodes: list[torch.fx.Node] = []

    def resolve(value: Any) -> Any:
        if isinstance(value, Reference):
            return nodes[value.number]
        if isinstance(value, (list, tuple)):
            return type(value)(resolve(each) for each in value)
        if isinstance(value, slice):
            return slice(resolve(value.start), resolve(value.stop), resolve(value.step))
        return value

    for index in range(len(graph.inputs)):
        nodes.append(made.placeholder(f"input_{index}"))
    for index, constant in enumerate(graph.constants):
        root.register_buffer(f"constant_{index}", constant)
        nodes.append(made.get_attr(f"constant_{index}"))
    for function, arguments, keywords in graph.nodes:
        named = {name: resolve(value) for name, value in keywords.items()}
        nodes.append(made.call_function(function, resolve(arguments), named))
    output = made.output(tuple(resolve(each) for each in graph.outputs))
    # The notebook has compiled the other half of the program for results with this layout.
    output.meta["user_visible_output_idxs"] = list(range(len(graph.outputs)))
    return torch.fx.GraphModule(root, made)


def _sources(graph: ImportedGraph) -> list[tuple[int, int]]:
    """Return the source of each symbol's value: an input, and a dimension or -1."""
    found: dict[str, tuple[int, int]] = {}
    for index, each in enumerate(graph.inputs):
        if isinstance(each, str):
            found[each] = index, -1
        elif isinstance(each, Geometry):
            for axis, size in enumerate(each.size):
                if isinstance(size, str):
                    found.setdefault(size, (index, axis))
    try:
        return [found[name] for name, *_ in graph.symbols]
    except KeyError as error:
        raise DescriptionError("a symbol has no value") from error


def _evaluate(size: Any, symbols: dict[str, Any]) -> Any:
    """Calculate a size."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return symbols[size]
    return SIZE_FUNCTIONS[size[0]](*(_evaluate(each, symbols) for each in size[1:]))


def _fit(
    tensor: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    changed: bool,
) -> torch.Tensor:
    """Return an input in the layout that the code expects, as the code does not check it."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.shape != size:
        raise DescriptionError("a graph was given another tensor than it has")
    if tensor.is_conj() or tensor.is_neg():
        raise DescriptionError("a graph was given a lazily conjugated tensor")
    found = tensor.stride()
    if found == stride or all(
        a == b or length < 2 for a, b, length in zip(found, stride, size, strict=True)
    ):
        return tensor
    if changed:
        raise DescriptionError("a graph was given a tensor that lies otherwise")
    return torch.empty_strided(size, stride, dtype=dtype, device=tensor.device).copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise DescriptionError("a graph is not described by bytes")
    host = tensor.cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel())


def _first_line(error: BaseException) -> str:
    """Return an error's first line, without the explanations that inductor adds."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"[:1000]
