"""CUDA graphs: operators are captured, and executed at every replay."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch

from tests.surface.checking import check, refused


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    ).cuda()


@check
def a_graph_is_executed_at_its_replays_only() -> None:
    static = torch.ones(3, device="cuda")
    total = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        doubled = (static * 2 + 0.5).exp().log() - 0.5
        total += doubled
    assert not torch.cuda.is_current_stream_capturing()
    assert total.tolist() == [0.0] * 3
    for value in (1.0, 4.0):
        static.fill_(value)
        graph.replay()
        torch.testing.assert_close(doubled.cpu(), torch.full((3,), 2 * value))
    torch.testing.assert_close(total.cpu(), torch.full((3,), 10.0))


@check
def a_whole_training_step_can_be_a_graph() -> None:
    model = network()
    eager = copy.deepcopy(model)
    data = [torch.randn(5, 4, device="cuda") for _ in range(4)]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    static = data[0].clone()
    for make in (
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        lambda model: torch.optim.Adam(model.parameters(), 0.01, capturable=True),
    ):
        other, optimizer = make(eager), make(model)
        for x in data[:2]:
            step(eager, other, x)
            step(model, optimizer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(model, optimizer, static)
        for x in data:
            static.copy_(x)
            graph.replay()
            step(eager, other, x)
            for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
                assert torch.equal(ours, theirs)
        graph.reset()


@check
def callables_can_be_graphed() -> None:
    model = network()
    eager = copy.deepcopy(model)
    x = torch.randn(5, 4, device="cuda", requires_grad=True)
    graphed: Any = torch.cuda.make_graphed_callables(model, (x.detach().clone().requires_grad_(),))
    for _ in range(2):
        y = x.detach().clone().requires_grad_()
        expected, found = eager(y), graphed(y)
        assert torch.equal(found, expected)
        (theirs,) = torch.autograd.grad(expected.sum(), y)
        (ours,) = torch.autograd.grad(found.sum(), y)
        assert torch.equal(ours, theirs)


@check
def random_operators_go_on_at_each_replay() -> None:
    torch.manual_seed(7)
    expected = [torch.rand(4, device="cuda").tolist() for _ in range(3)]
    torch.nn.functional.dropout(torch.ones(9, device="cuda"))
    torch.manual_seed(7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(4, device="cuda")
    found = []
    for _ in range(3):
        graph.replay()
        found.append(drawn.tolist())
    assert found == expected


@check
def shapes_that_nobody_knows_are_learnt_without_executing() -> None:
    torch.manual_seed(1)
    x = torch.randn(6, 3, 7, 11, device="cuda")
    state = torch.cuda.get_rng_state()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sorted_, order = torch.sort(x, dim=3)
        values, _ = torch.topk(x[..., :9], 3)
        dropped = torch.nn.functional.alpha_dropout(sorted_, 0.3, True)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    graph.replay()
    assert torch.equal(sorted_.cpu(), x.cpu().sort(dim=3).values)
    assert torch.equal(order.cpu(), x.cpu().sort(dim=3).indices)
    assert torch.equal(values.cpu(), x.cpu()[..., :9].topk(3).values)
    assert dropped.shape == x.shape


@check
def what_waits_for_the_device_is_refused_in_a_capture() -> None:
    x = torch.ones(3, device="cuda")
    for forbidden in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        lambda: x.copy_(torch.zeros(3)),
        lambda: torch.cuda.synchronize(),
        lambda: torch.cuda.manual_seed(1),
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert "operation not permitted when stream is capturing" in refused(forbidden)
    assert x.tolist() == [1.0] * 3
    graph = torch.cuda.CUDAGraph()
    assert "capture" in refused(graph.replay)
    assert "behind a device proxy" in refused(graph.raw_cuda_graph)


@check
def a_graph_keeps_what_it_needs_and_gives_it_back() -> None:
    gc.collect()  # as a capture does
    before = torch.cuda.memory_allocated()
    given = torch.full((1 << 18,), 3.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = given
        for _ in range(10):  # each of these is freed: the graph uses their memory again
            x = x + 1
    del given
    assert torch.cuda.memory_allocated() - before < 4 << 20
    noise = [torch.randn(1 << 18, device="cuda") for _ in range(3)]
    graph.replay()
    assert x.max().item() == 13
    del noise
    graph.reset()
    assert torch.cuda.memory_allocated() - before == 1 << 20
    assert x.min().item() == 13
    del x
    assert torch.cuda.memory_allocated() == before


@check
def a_graph_has_the_settings_of_its_capture() -> None:
    x = torch.arange(4, device="cuda")
    torch.set_default_dtype(torch.float64)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            half = x / 2
    finally:
        torch.set_default_dtype(torch.float32)
    graph.replay()
    assert half.dtype == torch.float64
    assert half.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert (x / 2).cpu().dtype == torch.float32


@check
def pools_are_names() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        assert torch.ones(2, device="cuda").sum().item() == 2
    assert pool.id != torch.cuda.MemPool().id
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        x = torch.ones(2, device="cuda")
    with torch.cuda.graph(second, pool=first.pool()):
        y = x + 1
    first.replay()
    second.replay()
    assert second.pool() == first.pool()
    assert y.tolist() == [2.0, 2.0]
