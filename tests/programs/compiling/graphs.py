"""Checks of descriptions of graphs, without a device session.

Prints one JSON object for each check: its name, and the error's text or "".
"""

from __future__ import annotations

import copy
import json
import random
import traceback
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kernelproxy.common import graph_format
from kernelproxy.common.graph_format import DescriptionError, UnsupportedGraphError
from kernelproxy.kernel.graph_export import describe
from kernelproxy.worker import graph_compile, graph_import

CHECKS: list[Callable[[], None]] = []
CPU = torch.device("cpu")
OPTIONS = {"is_inference": True, "is_backward": False, "settings": {"epilogue_fusion": True}}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


Mode = Literal["real", "fake", "symbolic"]


def captured(function: Callable[..., Any], *inputs: torch.Tensor, mode: Mode = "fake") -> Any:
    return make_fx(lambda *given: (function(*given),), tracing_mode=mode)(*inputs)


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    constant = torch.full((3,), 2.5, dtype=torch.float64)
    return torch.cat([x.float() @ y, (x * constant).float()], -1).sum(-1, keepdim=True)


X, Y = torch.arange(6.0, dtype=torch.float64).reshape(2, 3), torch.ones(3, 2)


def description() -> dict[str, Any]:
    return graph_format.unpack(describe(captured(mixed, X, Y), OPTIONS).data)


def refused(changed: Callable[[dict[str, Any]], object]) -> None:
    bad = copy.deepcopy(description())
    changed(bad)
    try:
        graph_import.rebuild(graph_format.pack(bad), CPU)
    except DescriptionError:
        return
    raise AssertionError("it was not refused")


@check
def a_rebuilt_graph_calculates_the_same() -> None:
    module = captured(mixed, X, Y)
    graph = graph_import.rebuild(describe(module, OPTIONS).data, CPU)
    found = torch.fx.Interpreter(graph_compile._module(graph)).run(X, Y)
    assert torch.equal(found[0], mixed(X, Y))


@check
def sizes_are_symbols() -> None:
    def shape(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2).sin() * x.shape[0] + x.numel() / 3

    module = captured(shape, torch.ones(6, 4), mode="symbolic")
    described = describe(module, OPTIONS)
    graph = graph_import.rebuild(described.data, CPU)
    assert len(graph.symbols) == len(described.symbols) == 2
    assert [hint for _, hint, *_ in graph.symbols] == [6, 4]
    for rows in (6, 8):
        x = torch.rand(rows, 4)
        assert torch.equal(torch.fx.Interpreter(graph_compile._module(graph)).run(x)[0], shape(x))


def with_node(target: object, bad: dict[str, Any]) -> None:
    """Add a node of this target to a description."""
    bad["nodes"].append([target, [], {}])


@check
def what_has_no_place_in_a_description_is_refused() -> None:
    refused(lambda bad: bad.update(version=2))
    refused(lambda bad: bad.pop("nodes"))
    refused(lambda bad: bad["options"]["settings"].update({"cpp.cxx": 1}))
    refused(lambda bad: bad["options"]["settings"].update({"epilogue_fusion": "yes"}))
    refused(lambda bad: bad["outputs"].append(3))
    refused(lambda bad: bad["outputs"].append({"node": 10_000}))
    refused(lambda bad: bad["outputs"].append({"node": -1}))
    refused(lambda bad: bad["inputs"][0]["tensor"].update(dtype="nn"))
    refused(lambda bad: bad["inputs"][0]["tensor"].update(place="elsewhere"))
    refused(lambda bad: bad["inputs"][0]["tensor"].update(size=["s9", 3]))
    refused(lambda bad: bad["inputs"][0]["tensor"].update(size=[["eval", 3], 3]))
    refused(lambda bad: bad["nodes"].append(["aten.sin.default", [{"module": "os"}], {}]))
    for target in (
        "aten.no_such.default", "aten.sin.no_such", "aten.__class__.default", "aten.sin.__call__",
        "os.system", "operator.attrgetter", "torch.load", "torch.ops.aten.sin", "builtins.eval",
        "sing.run_graph.default", "", 5,
    ):  # fmt: skip
        refused(partial(with_node, target))


@check
def damaged_bytes_are_refused() -> None:
    data = describe(captured(mixed, X, Y), OPTIONS).data
    chance = random.Random(4)
    accepted = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        for bad in (bytes(damaged), data[: chance.randrange(len(data))]):
            try:
                graph_import.rebuild(bad, CPU)
                accepted += bad != data
            except DescriptionError:
                continue
    assert accepted == 0
    plain = json.dumps(description())
    for _ in range(600):
        at = chance.randrange(len(plain))
        mutated = plain[:at] + chance.choice('[]{}",:09ax-') + plain[at + 1 :]
        try:
            graph_import.rebuild(zlib.compress(mutated.encode()), CPU)
        except DescriptionError:
            continue


@check
def inputs_are_checked_before_code_runs() -> None:
    described = describe(captured(mixed, X, Y), OPTIONS)
    compiled = graph_compile.CompiledGraph.__new__(graph_compile.CompiledGraph)
    # Its code is a stub: only its arguments are checked here.
    compiled._graph, compiled._device = graph_import.rebuild(described.data, CPU), CPU
    compiled._names, compiled._sources, compiled._known, compiled._variants = [], [], {}, {}
    compiled._code, compiled._guard = lambda given: [sum(map(torch.sum, given))], lambda _: True
    (total,) = compiled.run([], [X, Y], [])
    assert total.item() == X.sum().item() + Y.sum().item()
    assert compiled.run([], [X, Y.T.contiguous().T.reshape(2, 3).T], [])[0].item() == total.item()
    for inputs in (
        [X], [X, Y, Y], [X.float(), Y], [X[:1], Y], [X[0], Y], [Y, X], [X.reshape(3, 2), Y],
    ):  # fmt: skip
        try:
            compiled.run([], inputs, [])
        except DescriptionError:
            continue
        raise AssertionError(f"{[tuple(each.shape) for each in inputs]} were accepted")


@check
def a_description_is_what_its_digest_names() -> None:
    data = describe(captured(mixed, X, Y), OPTIONS).data
    try:
        graph_compile.CompiledGraph(data, "0" * 64, CPU)
    except DescriptionError:
        return
    raise AssertionError("another description was accepted")


@check
def what_cannot_be_described_is_said() -> None:
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero().sum()

    cases: tuple[tuple[Callable[..., Any], Mode, str], ...] = (
        (unknown, "symbolic", "depend on data"),
        (lambda x: x.conj() * 1j, "fake", "conjugated"),
    )
    for function, mode, said in cases:
        example = torch.ones(3, 2, dtype=torch.cfloat if "conj" in said else torch.float)
        if "conj" in said:
            example = example.conj()
        try:
            describe(captured(function, example, mode=mode), OPTIONS)
        except UnsupportedGraphError as error:
            found = str(error)
        else:
            found = "it was described"
        assert said in found, found


def main() -> None:
    for function in CHECKS:
        error = ""
        try:
            function()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": function.__name__, "error": error}), flush=True)


if __name__ == "__main__":
    main()
