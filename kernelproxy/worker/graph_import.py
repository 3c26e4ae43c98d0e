"""Rebuilding graphs from their descriptions, which are not trusted.

A description names functions. Allowed are those of `kernelproxy.common.graph_format`, and operators
of torch itself, which a log may call as well. Nothing is evaluated or imported by name.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelproxy.common import graph_format
from kernelproxy.common.graph_format import DescriptionError

_INPUTS_MAX = 1 << 16


@dataclass(frozen=True)
class Geometry:
    """Layout of an input tensor: sizes and strides, as expressions of the symbols."""

    dtype: torch.dtype
    place: str
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    changed: bool


@dataclass(frozen=True)
class ImportedGraph:
    """Graph for one device.

    Parameters
    ----------
    symbols : tuple of (str, int, int or None, int or None, bool)
        Name, hint, least, most, and whether it is positive.
    inputs : tuple
        `Geometry`, or the size expression of a number.
    constants : tuple of torch.Tensor
    nodes : tuple of (function, arguments, keywords)
        Arguments contain `Reference` in place of other nodes' results.
    outputs : tuple of Reference
    is_inference, is_backward : bool
    settings : dict
        Settings of inductor.
    """

    symbols: tuple[tuple[str, int, int | None, int | None, bool], ...]
    inputs: tuple[Any, ...]
    constants: tuple[torch.Tensor, ...]
    nodes: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...]
    outputs: tuple[Reference, ...]
    is_inference: bool
    is_backward: bool
    settings: dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """Result of a node, by the node's number."""

    number: int


def rebuild(data: bytes, device: torch.device) -> ImportedGraph:
    """Rebuild a graph for a device.

    Raises
    ------
    DescriptionError
        If the bytes are not a valid description.
    """
    try:
        return _Rebuilder(graph_format.unpack(data), device).rebuild()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise DescriptionError(
            f"the description of a graph does not add up: {type(error).__name__}: {error}"
        ) from error


class _Rebuilder:
    def __init__(self, description: dict[str, Any], device: torch.device) -> None:
        self._description, self._device = description, device
        self._names: set[str] = set()
        self._known = 0  # number of nodes so far

    def rebuild(self) -> ImportedGraph:
        found = self._description
        symbols = tuple(_symbol(*each) for each in found["symbols"])
        self._names = {symbol[0] for symbol in symbols}
        inputs = tuple(self._input(each) for each in found["inputs"])
        constants = tuple(_constant(**each) for each in found["constants"])
        self._known = len(inputs) + len(constants)
        if self._known > _INPUTS_MAX:
            raise DescriptionError("a graph has too many inputs")
        nodes = tuple(self._node(*each) for each in found["nodes"])
        outputs = tuple(self._value(each) for each in found["outputs"])
        if not all(isinstance(each, Reference) for each in outputs):
            raise DescriptionError("a graph returns what is no tensor")
        options = found["options"]
        settings = {name: options["settings"][name] for name in options["settings"]}
        if any(
            name not in graph_format.SETTINGS or not isinstance(value, (bool, int))
            for name, value in settings.items()
        ):
            raise DescriptionError("a graph has a setting that it may not have")
        return ImportedGraph(
            symbols, inputs, constants, nodes, outputs,
            bool(options["is_inference"]), bool(options["is_backward"]), settings,
        )  # fmt: skip

    def _input(self, found: dict[str, Any]) -> Any:
        if "number" in found:
            return self._size(found["number"])
        geometry = found["tensor"]
        size = tuple(self._size(each) for each in geometry["size"])
        stride = tuple(self._size(each) for each in geometry["stride"])
        if len(size) != len(stride):
            raise DescriptionError("a tensor has other sizes than strides")
        place, changed = geometry["place"], bool(found["changed"])
        if place not in graph_format.PLACES or (changed and place != "device"):
            raise DescriptionError("a tensor is at an unknown place")
        return Geometry(_dtype(geometry["dtype"]), place, size, stride, changed)

    def _size(self, found: Any) -> Any:
        """Check a size."""
        if isinstance(found, int) and not isinstance(found, bool):
            return found
        if isinstance(found, str):
            if found not in self._names:
                raise DescriptionError("a size has an unknown symbol")
            return found
        name, *arguments = found
        if name not in graph_format.SIZE_FUNCTIONS:
            raise DescriptionError("a size is calculated by an unknown function")
        return (name, *(self._size(each) for each in arguments))

    def _node(self, target: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        function = _function(target)
        made = (
            function,
            tuple(self._value(each) for each in arguments),
            {name: self._value(each) for name, each in keywords.items()},
        )
        self._known += 1
        return made

    def _value(self, found: Any) -> Any:
        if found is None or isinstance(found, (bool, int, str)):
            return found
        if isinstance(found, list):
            return [self._value(each) for each in found]
        ((kind, content),) = found.items()
        if kind == "node":
            if not 0 <= _integer(content) < self._known:
                raise DescriptionError("a node uses one that comes later")
            return Reference(content)
        if kind == "float":
            return float.fromhex(content)
        if kind == "complex":
            return complex(float.fromhex(content[0]), float.fromhex(content[1]))
        if kind == "tuple":
            return tuple(self._value(each) for each in content)
        if kind == "slice":
            return slice(*(self._value(each) for each in content))
        if kind == "device":
            return self._device if content == "cuda" else torch.device("cpu")
        if kind == "dtype":
            return _dtype(content)
        if kind == "layout":
            return _instance(content, torch.layout)
        if kind == "format":
            return _instance(content, torch.memory_format)
        raise DescriptionError("a value is of an unknown kind")


def _symbol(
    name: str, hint: int, least: int | None, most: int | None, positive: bool
) -> tuple[str, int, int | None, int | None, bool]:
    if not isinstance(name, str):
        raise DescriptionError("a symbol has no name")
    for bound in (least, most):
        if bound is not None:
            _integer(bound)
    return name, _integer(hint), least, most, bool(positive)


def _integer(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool):
        raise DescriptionError("something is no integer")
    return found


def _instance(name: str, kind: type) -> Any:
    found = torch.__dict__.get(name)
    if not isinstance(found, kind):
        raise DescriptionError(f"{name!r} is unknown")
    return found


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = _instance(name, torch.dtype)
    return found


def _constant(dtype: str, size: list[int], bytes: str) -> torch.Tensor:
    data = bytearray(base64.b64decode(bytes, validate=True))
    kind = _dtype(dtype)
    if not data:
        return torch.empty([_integer(each) for each in size], dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape([_integer(each) for each in size])


def _function(target: str) -> Callable[..., Any]:
    """Return the function that a node calls."""
    if not isinstance(target, str):
        raise DescriptionError("a node calls nothing")
    if target in graph_format.arithmetic():
        return graph_format.arithmetic()[target]
    library, _, name = target.partition(".")
    name, _, overload = name.partition(".")
    if library in graph_format.LIBRARIES:
        packet = getattr(getattr(torch.ops, library), name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads():  # type: ignore[no-untyped-call]
            return getattr(packet, overload)  # type: ignore[no-any-return]
    raise DescriptionError(f"{target} is unknown to this torch")
