"""Small operations of a runner: issue operators, read numbers, count round trips."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks import programs

#: Tokens generated in two runs; the difference gives the cost of further tokens.
GENERATED = (16, 48)

Operator = Callable[[], object]


def operators(device: str) -> dict[str, Operator]:
    """Make the operators to issue; those with `grad` build a graph, which is dropped."""
    torch.manual_seed(0)
    x, y, changed = (torch.randn(4, 4).to(device) for _ in range(3))
    weight, bias = torch.ones(4).to(device), torch.zeros(4).to(device)
    positive, rows = (x > 0), torch.tensor([0, 2]).to(device)
    grown = x.clone().requires_grad_()
    return {
        "add": lambda: torch.add(x, y),
        "mul by a number": lambda: x * 2.0,
        "relu": lambda: torch.relu(x),
        "mm": lambda: torch.mm(x, y),
        "cat": lambda: torch.cat([x, y]),
        "view, add": lambda: x.view(16) + 1.0,
        "where": lambda: torch.where(positive, x, y),
        "layer_norm": lambda: F.layer_norm(x, (4,), weight, bias),
        "embedding": lambda: F.embedding(rows, x),
        "softmax": lambda: torch.softmax(x, -1),
        "sum": lambda: x.sum(),
        "add_ in place": lambda: changed.add_(y),
        "add, grad": lambda: torch.add(grown, y),
        "relu, grad": lambda: torch.relu(grown),
        "mm, grad": lambda: torch.mm(grown, y),
        "layer_norm, grad": lambda: F.layer_norm(grown, (4,), weight, bias),
    }


def issue(operator: Operator, count: int) -> float:
    """Return the seconds to issue an operator `count` times."""
    begin = time.perf_counter()
    for _ in range(count):
        operator()
    return time.perf_counter() - begin


def read_scalars(device: str, count: int) -> dict[str, float]:
    """Return microseconds per read of `count` numbers, and of half as many computed ones."""
    number, one = torch.zeros(1).to(device), torch.ones(1).to(device)

    def times(read: Operator, count: int) -> list[float]:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            read()
            found.append((time.perf_counter() - begin) * 1e6)
        return sorted(found)

    times(number.item, count // 10)
    computed = times(lambda: (number + one).item(), count // 2)
    plain = times(number.item, count)
    return {
        "median": statistics.median(plain),
        "high": plain[count * 99 // 100],
        "computed": statistics.median(computed),
    }


def count_trips(device: str, requests: Callable[[], int]) -> dict[str, float]:
    """Count the requests for printing and reading, and for each further generated token."""
    tensor, large = torch.randn(4, 4).to(device), torch.randn(200, 200).to(device)
    counts, leaf = torch.arange(9).to(device), torch.nn.Parameter(tensor)
    reads: dict[str, Operator] = {
        "item": tensor[0, 0].item,
        "tolist": tensor.tolist,
        "tolist of a transposed one": tensor.t().tolist,
        "repr": lambda: repr(tensor),
        "repr of 200 x 200": lambda: repr(large),
        "repr of integers": lambda: repr(counts),
        "repr of a parameter": lambda: repr(leaf),
        "format": lambda: f"{tensor[0, 0]:.3f}",
        "bool": lambda: bool((tensor > 0).all()),
    }
    trips: dict[str, float] = {}
    for name, read in reads.items():
        read()  # the geometry of an operator's result is learnt once
        before = requests()
        read()
        trips[name] = requests() - before
    for kind, dtype in (("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16")):
        model, _ = programs.language_model(kind, device, small=True)
        model.to(getattr(torch, dtype))
        for sample in (False, True):
            asked = []
            for length in (GENERATED[0], *GENERATED):  # the first run is a warm-up
                before = requests()
                programs.generate(model, device, length, sample=sample)
                asked.append(requests() - before)
            name = f"{kind}, {dtype}, {'sampling' if sample else 'greedy'}: a further token"
            trips[name] = (asked[2] - asked[1]) / (GENERATED[1] - GENERATED[0])
    return trips
