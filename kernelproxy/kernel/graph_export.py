"""Descriptions of graphs: what the notebook ships of a program captured by ``torch.compile``."""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelproxy.common import graph_format
from kernelproxy.common.graph_format import UnsupportedGraphError

#: Limit for a constant tensor on the host.
_CONSTANT_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Input:
    """Input of a graph.

    Parameters
    ----------
    kind : str
        "number", "tensor" (on the device, or a number on the host), "changed" (a device tensor that
        the graph writes to), or "host" (a tensor that is to be moved to the device).
    """

    kind: str


@dataclass(frozen=True)
class GraphOutput:
    """Output of a graph.

    Parameters
    ----------
    kind : str
        "constant", "input", "number" (calculated from the symbols), "tensor", or "host" (a tensor
        that is to be moved to the host).
    value : object
        Constant; index of the input or of the result; or function of the symbols' values.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Description:
    """Graph that can be shipped.

    Parameters
    ----------
    data : bytes
        Packed description, see `kernelproxy.common.graph_format`.
    inputs : list of Input
    outputs : list of Output
    constants : list of torch.Tensor
        Further inputs that live on the device.
    symbols : dict
        Name of each symbol → input, and dimension or -1 for a number, that has its value.
    """

    data: bytes
    inputs: list[Input]
    outputs: list[GraphOutput]
    constants: list[torch.Tensor]
    symbols: dict[str, tuple[int, int]]


def describe(module: torch.fx.GraphModule, options: dict[str, Any]) -> Description:
    """Describe a graph of aten operators whose nodes carry fake tensors.

    Parameters
    ----------
    module : torch.fx.GraphModule
    options : dict
        Options of the description, see `kernelproxy.common.graph_format`.

    Raises
    ------
    UnsupportedGraphError
        If it contains something that cannot be shipped.
    """
    return _Describer(module, options).describe()


class _Describer:
    def __init__(self, module: torch.fx.GraphModule, options: dict[str, Any]) -> None:
        self._module, self._options = module, options
        self._numbers: dict[torch.fx.Node, int] = {}
        self._symbols: dict[Any, tuple[int, int]] = {}
        self._free: set[Any] = set()
        self._constants: list[torch.Tensor] = []
        self._host_constants: list[dict[str, Any]] = []

    def describe(self) -> Description:
        nodes = list(self._module.graph.nodes)
        places = [node for node in nodes if node.op == "placeholder"]
        written = _written(nodes)
        inputs, described = [], []
        for index, node in enumerate(places):
            self._numbers[node] = index
            one, description = self._input(index, node, node in written)
            inputs.append(one)
            described.append(description)
        attributes = [node for node in nodes if node.op == "get_attr"]
        self._take_constants(attributes, described)
        calls = [self._call(node) for node in nodes if node.op == "call_function"]
        for node in nodes:
            if node.op not in ("placeholder", "get_attr", "call_function", "output"):
                raise UnsupportedGraphError(f"it has a node of the kind {node.op}")
        outputs, results = self._outputs(nodes[-1], places)
        data = graph_format.pack(
            {
                "version": graph_format.FORMAT,
                "symbols": self._describe_symbols(),
                "inputs": described,
                "constants": self._host_constants,
                "nodes": calls,
                "outputs": results,
                "options": self._options,
            }
        )
        symbols = {str(symbol): source for symbol, source in self._symbols.items()}
        return Description(data, inputs, outputs, self._constants, symbols)

    # ------------------------------------------------------------------ inputs

    def _input(self, index: int, node: Any, changed: bool) -> tuple[Input, dict[str, Any]]:
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            size = self._size(value)
            if isinstance(value, torch.SymInt) and isinstance(size, str):
                self._symbols[value.node.expr] = (index, -1)
            return Input("number"), {"number": size}
        if not isinstance(value, torch.Tensor):
            raise UnsupportedGraphError(f"it has an input of the type {type(value).__name__}")
        geometry = self._geometry(value)
        for dimension, size in enumerate(value.size()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                self._symbols.setdefault(size.node.expr, (index, dimension))
        if geometry["place"] == "device":
            kind = "changed" if changed else "tensor"
        elif changed:
            raise UnsupportedGraphError("it changes a tensor that is not on the device")
        else:
            kind = "tensor" if geometry["place"] == "number" else "host"
        return Input(kind), {"tensor": geometry, "changed": changed}

    def _take_constants(self, nodes: list[Any], described: list[dict[str, Any]]) -> None:
        """Number the constants: those on the device are further inputs."""
        host = []
        for node in nodes:
            value = operator.attrgetter(node.target)(self._module)
            if not isinstance(value, torch.Tensor):
                raise UnsupportedGraphError("it has a part that is another graph")
            if value.device.type == "cpu":
                host.append((node, value))
                continue
            self._numbers[node] = len(described)
            described.append({"tensor": self._geometry(value), "changed": False})
            self._constants.append(value)
        for node, value in host:
            self._numbers[node] = len(described) + len(self._host_constants)
            self._host_constants.append(_constant(value))

    def _describe_symbols(self) -> list[list[Any]]:
        if self._free - self._symbols.keys():
            raise UnsupportedGraphError("a size in it does not follow from its inputs")
        described = []
        for symbol in self._symbols:
            env = self._shape_env
            bounds = env.var_to_range.get(symbol)
            values = getattr(env, "backed_var_to_val", None) or env.var_to_val
            least, most = (None, None) if bounds is None else (bounds.lower, bounds.upper)
            described.append(
                [str(symbol), int(values[symbol]), _bound(least), _bound(most),
                 bool(symbol.is_positive)]
            )  # fmt: skip
        return described

    # ------------------------------------------------------------------ nodes

    def _call(self, node: Any) -> list[Any]:
        _check_backed(node.meta.get("val"))
        described = [
            _target(node.target),
            [self._value(value) for value in node.args],
            {name: self._value(value) for name, value in node.kwargs.items()},
        ]
        self._numbers[node] = len(self._numbers)
        return described

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return {"node": self._numbers[value]}
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, tuple):
            return {"tuple": [self._value(item) for item in value]}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, slice):
            return {"slice": [self._value(i) for i in (value.start, value.stop, value.step)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.layout):
            return {"layout": str(value).removeprefix("torch.")}
        if isinstance(value, torch.memory_format):
            return {"format": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": _place(value)}
        raise UnsupportedGraphError(f"it has an argument of the type {type(value).__name__}")

    # ------------------------------------------------------------------ outputs

    def _outputs(self, node: Any, places: list[Any]) -> tuple[list[GraphOutput], list[Any]]:
        outputs: list[GraphOutput] = []
        results: list[Any] = []
        found: dict[Any, GraphOutput] = {}
        for value in node.args[0]:
            if not isinstance(value, torch.fx.Node):
                if value is not None and not isinstance(value, (int, float)):
                    raise UnsupportedGraphError(f"it returns a {type(value).__name__}")
                outputs.append(GraphOutput("constant", value))
                continue
            if value not in found:
                found[value] = self._output(value, places, len(results))
                if found[value].kind in ("tensor", "host"):
                    results.append(self._value(value))
            outputs.append(found[value])
        return outputs, results

    def _output(self, node: Any, places: list[Any], index: int) -> GraphOutput:
        if node.op == "placeholder":
            return GraphOutput("input", places.index(node))
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            _check_tensor(value)
            return GraphOutput("host" if value.device.type == "cpu" else "tensor", index)
        if isinstance(value, int):
            return GraphOutput("constant", value)
        if isinstance(value, torch.SymInt):
            return GraphOutput("number", _function(value.node.expr, self._symbols))
        raise UnsupportedGraphError(f"it returns a {type(value).__name__}")

    # ------------------------------------------------------------------ geometry

    def _geometry(self, tensor: torch.Tensor) -> dict[str, Any]:
        _check_tensor(tensor)
        place = "device"
        if _place(tensor.device) == "cpu":
            place = "host" if tensor.dim() else "number"
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "place": place,
            "size": [self._size(size) for size in tensor.size()],
            "stride": [self._size(size) for size in tensor.stride()],
        }

    def _size(self, size: int | torch.SymInt) -> Any:
        if isinstance(size, int):
            return int(size)
        _check_backed(size)
        self._shape_env = size.node.shape_env
        self._free |= size.node.expr.free_symbols
        return _expression(size.node.expr)


def _written(nodes: list[Any]) -> set[Any]:
    """Return the inputs that a graph writes to."""
    written = set()
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for position, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if position < len(node.args):
                value = node.args[position]
            else:
                value = node.kwargs.get(argument.name)
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, torch.fx.Node) and one.op == "placeholder":
                    if node.target is not torch.ops.aten.copy_.default:
                        raise UnsupportedGraphError(f"it changes an input by {node.target}")
                    written.add(one)
    return written


def _target(target: Callable[..., Any]) -> str:
    """Return the name of a function that a node calls."""
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace not in graph_format.LIBRARIES:
            raise UnsupportedGraphError(f"it uses {target}, which is no operator of torch itself")
        return f"{target}"
    for name, function in graph_format.arithmetic().items():
        if function is target:
            return name
    raise UnsupportedGraphError(
        f"it uses {getattr(target, '__name__', target)}, which is no operator"
    )


def _place(device: torch.device) -> str:
    if device.type in ("cpu", "cuda"):
        return str(device.type)
    raise UnsupportedGraphError(f"it uses the device {device}")


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedGraphError("it has tensors that are sparse, nested or quantized")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedGraphError("it has lazily conjugated tensors")
    for size in (*tensor.size(), *tensor.stride()):
        _check_backed(size)


def _check_backed(value: Any) -> None:
    """Refuse sizes that depend on data: only the device knows them."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_backed(item)
    elif isinstance(value, torch.Tensor):
        for size in (*value.size(), *value.stride()):
            _check_backed(size)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        env = value.node.shape_env
        values = getattr(env, "backed_var_to_val", None)
        values = env.var_to_val if values is None else values
        if any(symbol not in values for symbol in value.node.expr.free_symbols):
            raise UnsupportedGraphError("sizes in it depend on data")


def _expression(expression: Any) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    if name in graph_format.SIZE_FUNCTIONS:
        return [name, *(_expression(argument) for argument in expression.args)]
    raise UnsupportedGraphError(f"sizes in it are calculated by {name}")


def _function(expression: Any, symbols: dict[Any, tuple[int, int]]) -> Callable[..., int]:
    """Return a function of the values of all symbols, in their order."""
    from torch.utils._sympy.printers import PythonPrinter

    missing = expression.free_symbols - symbols.keys()
    if missing:
        raise UnsupportedGraphError("a size that it returns does not follow from its inputs")
    names = ", ".join(str(symbol) for symbol in symbols)
    code = PythonPrinter().doprint(expression)
    function: Callable[..., int] = eval(f"lambda {names}: {code}", {"math": math})  # generated here
    return function


def _constant(value: torch.Tensor) -> dict[str, Any]:
    _check_tensor(value)
    if value.nbytes > _CONSTANT_BYTES_MAX:
        raise UnsupportedGraphError("it has a large constant on the host")
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "size": list(value.size()),
        "bytes": base64.b64encode(bytes(flat.tolist())).decode(),
    }


def _bound(value: Any) -> int | None:
    return int(value) if value is not None and value.is_Integer else None
