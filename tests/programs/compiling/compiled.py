"""Programs that compile, on one device: ``compiled.py DEVICE [NAME …]``.

Prints one JSON object for each: its name, numbers that are compared bit for bit, numbers that may
differ by rounding, facts that must be the same, and the error's text or "".
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn import functional

Result = dict[str, Any]
PROGRAMS: dict[str, Callable[[str], Result]] = {}


def program(function: Callable[[str], Result]) -> Callable[[str], Result]:
    PROGRAMS[function.__name__] = function
    return function


def numbers(tensor: torch.Tensor) -> list[str]:
    return [float(value).hex() for value in tensor.detach().cpu().flatten().tolist()]


def graphs() -> int:
    """Return the number of captured graphs."""
    return int(counters["stats"]["unique_graphs"])


def operators() -> int:
    """Return the number of operators sent to the device; 0 without a proxy."""
    from kernelproxy.kernel import activation

    client = activation.current().client
    return int(client.statistics()["operators"]) if client else 0


def train(
    net: torch.nn.Module, device: str, batches: list[int], **options: Any
) -> tuple[list[str], torch.nn.Module]:
    """Return the losses of one step for each batch."""
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, foreach=False)
    data = [torch.randn(size, 12) for size in batches]

    @torch.compile(**options)
    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        return net(inputs).square().mean()

    torch.manual_seed(11)  # seeds the device's generator, too
    losses = []
    for inputs in data:
        optimizer.zero_grad()
        loss = loss_of(inputs.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item().hex() for loss in losses], net


def dense(dropout: float = 0.25) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 24),
        torch.nn.LayerNorm(24),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(24, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Linear(8, 5),
    )


@program
def training_with_dropout_and_batch_norm(device: str) -> Result:
    losses, net = train(dense(), device, [16] * 6)
    norm: Any = net.get_submodule("5")
    return {"exact": losses + numbers(norm.running_mean), "facts": [graphs()]}


@program
def batches_of_any_size_share_a_graph(device: str) -> Result:
    torch.compiler.reset()
    before = graphs()
    losses, _ = train(dense(), device, [16, 24, 40, 33, 8, 57])
    return {"exact": losses, "facts": [graphs() - before]}


@program
def sizes_may_be_dynamic_from_the_start(device: str) -> Result:
    def mix(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        joined = torch.cat([x, y]).sin()
        return joined.reshape(2, -1).cumsum(1) * joined.shape[0], joined.numel() // 2

    before = graphs()
    compiled = torch.compile(mix, dynamic=True, fullgraph=True)
    exact, facts = [], []
    for rows in (3, 5, 8, 21):
        x = torch.arange(rows * 4.0).reshape(rows, 4) / 7
        found, half = compiled(x.to(device), (x + 1).to(device))
        exact += numbers(found)
        facts += [half, list(found.shape), list(found.stride())]
    return {"exact": exact, "facts": [*facts, graphs() - before]}


@program
def a_call_is_one_record(device: str) -> Result:
    compiled = torch.compile(lambda x: (functional.softmax(x * 2, -1) @ x.T).relu().sum(0))
    x = torch.linspace(-1, 1, 48).reshape(6, 8).to(device)
    compiled(x)
    before = operators()
    for _ in range(10):
        found = compiled(x)
    return {"exact": numbers(found), "records": operators() - before}


@program
def graphs_may_break(device: str) -> Result:
    def two(x: torch.Tensor) -> torch.Tensor:
        x = (x * 3).tanh()
        torch._dynamo.graph_break()
        return x.exp() + 1

    before = graphs()
    found = torch.compile(two)(torch.linspace(-1, 1, 10).to(device))
    return {"exact": numbers(found), "facts": [graphs() - before]}


@program
def modules_methods_and_modes(device: str) -> Result:
    torch.manual_seed(5)
    net = torch.nn.Linear(6, 6).to(device).eval()
    x = torch.linspace(-2, 2, 18).reshape(3, 6).to(device)
    exact = []
    with torch.no_grad():
        for options in ({"mode": "reduce-overhead"}, {"fullgraph": True}):
            exact += numbers(torch.compile(net, **options)(x))
        for backend in ("eager", "aot_eager"):
            exact += numbers(torch.compile(net, backend=backend)(x))
        net.compile()
        exact += numbers(net(x))
    return {"exact": exact}


@program
def what_is_changed_in_place_is_changed(device: str) -> Result:
    @torch.compile
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        y[0] = 5
        return x[1:]

    x = torch.ones(4, 3).to(device)
    y = torch.arange(12.0).reshape(4, 3).to(device)
    view = change(x, y)
    view.add_(1)  # the result is a part of the changed tensor
    return {"exact": numbers(x) + numbers(y) + numbers(view)}


@program
def views_and_inputs_are_returned_as_such(device: str) -> Result:
    @torch.compile
    def give(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.cos()
        return x, x.T, y, y[0]

    x = torch.arange(6.0).reshape(2, 3).to(device)
    same, turned, y, row = give(x)
    facts = [
        same is x,
        turned.data_ptr() == x.data_ptr(),
        row.data_ptr() == y.data_ptr(),
        list(turned.stride()),
    ]
    return {"exact": numbers(turned) + numbers(row), "facts": facts}


@program
def attention(device: str) -> Result:
    torch.manual_seed(9)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.001, foreach=False)
    x = torch.randn(2, 7, 16).to(device)
    compiled = torch.compile(layer)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(x, is_causal=False).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"close": losses}


@program
def convolution(device: str) -> Result:
    torch.manual_seed(9)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    x, y = torch.randn(5, 2, 6, 6).to(device), torch.tensor([0, 1, 2, 1, 0]).to(device)
    compiled = torch.compile(net)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"close": losses}


@program
def optimizers_compile(device: str) -> Result:
    weights = [torch.linspace(-1, 1, 6).to(device).requires_grad_() for _ in range(2)]
    optimizer = torch.optim.Adam(weights, 0.01)
    step = torch.compile(optimizer.step)
    for _ in range(3):
        optimizer.zero_grad()
        (weights[0].square().sum() + weights[1].exp().sum()).backward()
        step()
    return {"close": [float.fromhex(each) for weight in weights for each in numbers(weight)]}


@program
def results_may_be_on_the_host(device: str) -> Result:
    def mixed(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = x * table.to(device).sum() + torch.tensor([1.0, 2.0, 3.0], device=device)
        return scaled, scaled.cpu() + 1

    found, host = torch.compile(mixed)(torch.arange(3.0).to(device), torch.arange(4.0))
    facts = [found.device.type == device, host.device.type]
    return {"exact": numbers(found) + numbers(host), "facts": facts}


@program
def graphs_of_the_host_stay_there(device: str) -> Result:
    before = operators()
    found = torch.compile(lambda x: x.sin() * 2)(torch.arange(5.0))
    return {"exact": numbers(found), "facts": [found.device.type], "records": operators() - before}


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@program
def what_cannot_be_shipped_runs_as_written(device: str) -> Result:
    x = torch.linspace(-1, 1, 10).to(device)
    first = torch.compile(lambda x: twice(x.sin()) + 1)(x)
    second = torch.compile(lambda x: twice(x.cos()) + 1)(x)
    return {"close": (first + second).tolist()}


def main() -> None:
    device, *wanted = sys.argv[1:]
    for name, function in PROGRAMS.items():
        if wanted and name not in wanted:
            continue
        result: Result = {"error": ""}
        try:
            result |= function(device)
        except Exception:
            result["error"] = traceback.format_exc()
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main()
