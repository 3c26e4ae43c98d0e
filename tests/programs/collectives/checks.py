"""Check the collectives of a job of several ranks; each check says its name when it has passed.

Names of checks as arguments: only those.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.programs.collectives.expected import DTYPES, agree, contribution, ops, reduced
from tests.surface.checking import refused

CHECKS: list[Callable[[], None]] = []
# What gloo can reduce.
GLOO = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def me() -> int:
    return distributed.get_rank()


def size() -> int:
    return distributed.get_world_size()


@functools.cache
def on_cpu() -> Any:
    return distributed.new_group(backend="gloo")


@check
def nccl_is_the_backend() -> None:
    assert distributed.is_nccl_available()
    assert distributed.get_backend() == "nccl"
    assert torch.cuda.nccl.version() >= (2, 20)
    assert isinstance(
        distributed.group.WORLD._get_backend(torch.device("cuda")), distributed.ProcessGroupNCCL
    )


@check
def reductions_are_those_of_gloo() -> None:
    for dtype in DTYPES:
        for op in ops(dtype):
            parts = [contribution((dtype, op), rank, 50, dtype) for rank in range(size())]
            found = parts[me()].cuda()
            distributed.all_reduce(found, op)
            assert agree(found, reduced(parts, op)), (dtype, op)
            bitwise = str(op).startswith("RedOpType.B")
            if dtype in GLOO and op is not distributed.ReduceOp.AVG and not bitwise:
                host = parts[me()].clone()
                distributed.all_reduce(host, op, group=on_cpu())
                assert agree(found, host), (dtype, op)


@check
def contributions_are_multiplied_by_a_factor() -> None:
    ranks = size() * (size() + 1) / 2
    for factor in (0.5, torch.tensor(0.25), torch.tensor([0.25], device="cuda")):
        op = distributed._make_nccl_premul_sum(factor)
        x = torch.full((100,), me() + 1.0, device="cuda")
        distributed.all_reduce(x, op)
        assert torch.equal(x.cpu(), torch.full((100,), float(factor) * ranks))
        given = torch.full((3 * size(),), me() + 1.0, device="cuda", dtype=torch.bfloat16)
        part = torch.empty(3, device="cuda", dtype=torch.bfloat16)
        distributed.reduce_scatter_tensor(part, given, op)
        assert part.tolist() == [float(factor) * ranks] * 3
        assert given.tolist() == [me() + 1.0] * (3 * size())
    net = torch.nn.Linear(size(), size(), bias=False).cuda()
    fully_shard(net)
    net.set_gradient_divide_factor(4.0)
    net(torch.full((1, size()), me() + 1.0, device="cuda")).sum().backward()
    assert torch.equal(net.weight.grad.full_tensor().cpu(), torch.full((size(),) * 2, ranks / 4))


@check
def all_ranks_have_the_same_bits() -> None:
    for count in (5, 100_001):
        x = torch.randn(count, generator=torch.Generator().manual_seed(me())).cuda()
        distributed.all_reduce(x)
        found = [torch.empty_like(x) for _ in range(size())]
        distributed.all_gather(found, x)
        assert all(torch.equal(each, x) for each in found)


@check
def futures_have_the_result() -> None:
    x = torch.ones(4, device="cuda")
    work = distributed.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * size()] * 4
    assert work.is_completed()
    assert work.wait()


@check
def coalesced_calls_are_complete_after_their_work() -> None:
    group, device = distributed.group.WORLD, torch.device("cuda")
    xs = [torch.full((n,), float(me()), device=device) for n in (1, 5)]
    manager = distributed.distributed_c10d._coalescing_manager
    with manager(group, async_ops=True) as works:
        for x in xs:
            distributed.all_reduce(x)
    works.wait()
    total = sum(range(size()))
    assert [x.tolist() for x in xs] == [[total], [total] * 5]
    with manager(group, device, async_ops=True) as works:
        distributed.broadcast(xs[0], 0, async_op=True)
        distributed.isend(torch.full((3,), me(), device=device), (me() + 1) % size())
        found = torch.empty(3, dtype=torch.long, device=device)
        distributed.irecv(found, (me() - 1) % size())
    works.wait()
    assert found.tolist() == [(me() - 1) % size()] * 3
    assert xs[0].item() == total
    outputs = [torch.empty(size() * n, device=device) for n in (2, 3)]
    with manager(group):
        for out in outputs:
            own = torch.full((len(out) // size(),), float(me()), device=device)
            distributed.all_gather_into_tensor(out, own)
    assert [out.tolist() for out in outputs] == [
        [float(rank) for rank in range(size()) for _ in range(n)] for n in (2, 3)
    ]


@check
def functional_collectives_have_gradients_and_results() -> None:
    x = torch.full((size() * 2,), me() + 1.0, device="cuda")
    total = sum(range(1, size() + 1))
    assert (functional.all_reduce(x, "sum", distributed.group.WORLD) + 0).tolist() == (
        [total] * len(x)
    )
    gathered = functional.all_gather_tensor(x[:1], 0, distributed.group.WORLD)
    assert (gathered + 0).tolist() == list(range(1, size() + 1))
    part = functional.reduce_scatter_tensor(x, "avg", 0, distributed.group.WORLD)
    assert (part + 0).tolist() == [total / size()] * 2


@check
def objects_are_exchanged() -> None:
    found: list[Any] = [None] * size()
    distributed.all_gather_object(found, {"rank": me(), "text": "x" * 1000 * me()})
    assert [each["rank"] for each in found] == list(range(size()))
    objects = [list(range(10)), "text"] if me() == 1 else [None, None]
    distributed.broadcast_object_list(objects, 1)
    assert objects == [list(range(10)), "text"]
    taken: list[Any] = [None]
    distributed.scatter_object_list(taken, list(range(size())) if me() == 0 else None, 0)
    assert taken == [me()]


@check
def groups_are_split_and_destroyed() -> None:
    half = distributed.new_group([0, 1])
    if me() < 2:
        x = torch.ones(3, device="cuda")
        distributed.all_reduce(x, group=half)
        assert x.tolist() == [2.0] * 3
        distributed.destroy_process_group(half)
    parts = [[0], list(range(1, size()))]
    mine = distributed.split_group(split_ranks=parts)
    x = torch.ones(1, device="cuda")
    distributed.all_reduce(x, group=mine)
    assert x.item() == len(parts[min(me(), 1)])
    mesh = init_device_mesh("cuda", (1, size()), mesh_dim_names=("a", "b"))
    x = torch.ones(1, device="cuda")
    distributed.all_reduce(x, group=mesh["b"].get_group())
    assert x.item() == size()
    distributed.barrier()


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    ).cuda()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number * 100 + rank)).cuda()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    for number in range(3):
        optimizer.zero_grad()
        net(batch(number, me())).pow(2).mean().backward()
        optimizer.step()


def same_on_all_ranks(net: torch.nn.Module) -> None:
    for value in net.state_dict().values():
        other = value.clone()
        distributed.broadcast(other, 0)
        assert torch.equal(value, other)


@check
def ddp_trains_as_one_process_with_all_gradients() -> None:
    net = model().eval()  # batch statistics would differ
    single = copy.deepcopy(net)
    train(ddp := DistributedDataParallel(net), torch.optim.SGD(ddp.parameters(), 0.1))
    optimizer = torch.optim.SGD(single.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        losses = [single(batch(number, rank)).pow(2).mean() for rank in range(size())]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for one, other in zip(net.parameters(), single.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    same_on_all_ranks(net)


@check
def ddp_keeps_ranks_equal_with_batch_norm_hooks_and_uneven_inputs() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(net.parameters())
    with net.no_sync():
        net(batch(50, me())).sum().backward()
    train(net, optimizer)
    same_on_all_ranks(DistributedDataParallel(net.module).module)
    plain = DistributedDataParallel(model().eval())
    with plain.join():
        for number in range(1 + me()):
            plain(batch(number, me())).sum().backward()


@check
def zero_redundancy_optimizer_trains_as_adam() -> None:
    nets = [DistributedDataParallel(model().eval()) for _ in range(2)]
    train(nets[0], ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.Adam, lr=0.01))
    train(nets[1], torch.optim.Adam(nets[1].parameters(), lr=0.01))
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@check
def fully_sharded_modules_train_as_ddp() -> None:
    mesh = init_device_mesh("cuda", (size(),))
    net, other = model().eval(), DistributedDataParallel(model().eval())
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.Adam(net.parameters(), lr=0.01))
    train(other, torch.optim.Adam(other.parameters(), lr=0.01))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        whole: Any = one
        assert torch.allclose(whole.full_tensor(), two, rtol=1e-4, atol=1e-6)


@check
def distributed_tensors_are_sharded_and_gathered() -> None:
    mesh = init_device_mesh("cuda", (size(),))
    whole = torch.arange(35.0).reshape(7, 5).cuda()  # cannot be divided evenly
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    right = distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ right
    assert torch.allclose(product.full_tensor(), whole @ whole.t())
    assert torch.equal(product.redistribute(mesh, [Replicate()]).to_local(), product.full_tensor())


@check
def wrong_calls_have_errors_of_one_sentence() -> None:
    x = torch.ones(4, device="cuda")
    for function, error, words in (
        (lambda: distributed.all_reduce(x, distributed.ReduceOp.BAND), TypeError, "integers"),
        (lambda: distributed.recv(x), NotImplementedError, "name the rank that sends"),
        (lambda: distributed.all_reduce(x.to_sparse()), NotImplementedError, "to_dense"),
        (lambda: distributed.all_gather([x] * (size() + 1), x), ValueError, "must be"),
        (lambda: distributed.all_to_all_single(x[:3], x), ValueError, "all_to_all_single"),
    ):
        assert words in refused(function, error)
    distributed.barrier()  # nothing was sent


@check
def mismatches_and_lost_groups_are_errors_on_all_ranks() -> None:
    group, words = distributed.new_group(), "call different collectives"
    x = torch.ones(2, device="cuda")

    def mismatch() -> None:
        distributed.all_reduce(torch.ones(3 + me() % 2, device="cuda"), group=group)
        distributed.barrier(group=group)

    for function in (
        mismatch,
        lambda: distributed.all_reduce(x, group=group, async_op=True).wait(),
        lambda: functional.all_reduce(x, "sum", group) + 0,
    ):
        text = refused(function, distributed.DistBackendError)
        assert words in text, text


@check
def large_tensors_are_as_before_after_a_collective_that_failed() -> None:
    group, count = distributed.new_group(), 1 << 19
    given = [torch.randn(count + (i == 0) * me(), device="cuda") for i in range(3)]
    before = [x.cpu() for x in given]
    works = [distributed.all_reduce(x, group=group, async_op=True) for x in given]
    for work in works:
        assert "call different collectives" in refused(work.wait, distributed.DistBackendError)
    text = refused(lambda: distributed.all_reduce(given[1], group=group), RuntimeError)
    assert "call different collectives" in text
    assert all(torch.equal(x.cpu(), y) for x, y in zip(given, before, strict=True))
    distributed.all_reduce(given[1])
    found = [torch.empty_like(given[1]) for _ in range(size())]
    distributed.all_gather(found, given[1])
    assert all(torch.equal(each, given[1]) for each in found)


@check
def calls_without_a_wait_between_them_use_each_others_results() -> None:
    one, other = (torch.full((1 << 19,), me() + 1.0, device="cuda") for _ in range(2))
    works = [
        distributed.all_reduce(one, async_op=True),
        distributed.broadcast(other, 1, async_op=True),
        distributed.all_reduce(other, async_op=True),
        distributed.all_reduce(one, async_op=True),
    ]
    for work in works:
        work.wait()
    total = size() * (size() + 1) / 2
    assert torch.equal(one.cpu(), torch.full((1 << 19,), total * size()))
    assert torch.equal(other.cpu(), torch.full((1 << 19,), 2.0 * size()))


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(*place, ranks, rank == 0)
    for name in ("first", "second"):  # groups may be destroyed and made again
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.init_process_group(
            None if name == "first" else "nccl",
            device_id=torch.device("cuda:0"),
            store=distributed.PrefixStore(name, store),
            rank=rank,
            world_size=ranks,
        )
        distributed.all_reduce(torch.ones(1, device="cuda"))
    on_cpu()
    for function in CHECKS:
        if len(sys.argv) > 1 and function.__name__ not in sys.argv[1:]:
            continue
        function()
        print(function.__name__, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
