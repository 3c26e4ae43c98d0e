"""The operators of ``c10d`` for tensors of the device: read, exchange, upload."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from kernelproxy.kernel.activation import state
from kernelproxy.kernel.collectives import exchange
from kernelproxy.kernel.collectives.group import Call, as_type
from kernelproxy.kernel.collectives.launch import install_coalescing, launch, note, settling, unbox
from kernelproxy.kernel.collectives.replacement import Replacement
from kernelproxy.kernel.collectives.transfers import cut, joined, like, read, write
from kernelproxy.kernel.collectives.transport.frames import FrameKind, Header
from kernelproxy.kernel.collectives.tree import OPERATIONS, Reduction
from kernelproxy.kernel.collectives.work import Completion

Tensor = torch.Tensor
Tensors = Sequence[Tensor]

# ---------------------------------------------------------------- parts of the kernels


def _check(name: str, tensors: Tensors) -> torch.dtype:
    """Return the one dtype of tensors that a collective can use."""
    if not tensors:
        raise ValueError(f"{name}: there are no tensors")
    for tensor in tensors:
        if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
            raise ValueError(f"{name}: tensors must be CUDA and dense")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{name}: tensors must have identical type")
    return tensors[0].dtype


def _one(name: str, tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"{name}: one tensor of the device is expected, not {len(tensors)}")
    return tensors[0]


def _sized(name: str, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{name}: {what} must be {expected}, not {found}")


def _reduction(name: str, op: Any, dtype: torch.dtype) -> Reduction:
    kind = OPERATIONS[op.op()]
    factor = float(state.premultiplier(op)) if kind == "PREMUL_SUM" else 1.0
    reduction = Reduction(kind, factor)
    if problem := reduction.problem(dtype):
        raise TypeError(f"{name}: {problem}")
    if dtype is torch.bool and reduction.name == "SUM":
        return Reduction("MAX")  # as NCCL: both are "or"
    return reduction


def _text(name: str, dtype: torch.dtype, count: int | None = None) -> str:
    number = "" if count is None else f"{count} "
    return f"{name} of {number}{str(dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------- the operators


def allreduce_(
    tensors: Tensors, group: Any, op: Any, sparse: Any = None, async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Replace each tensor by its reduction over all ranks."""
    return list(tensors), allreduce_coalesced_(tensors, group, op, async_op)


def allreduce_coalesced_(
    tensors: Tensors, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    """Replace each tensor by its reduction over all ranks."""
    dtype = _check("all_reduce", tensors)
    reduction = _reduction("all_reduce", op, dtype)
    replacement = Replacement(tensors, reduction)

    def task(call: Call) -> None:
        given = replacement.take(call)
        keeps = replacement.vacates and call.size > 1
        found = exchange.all_reduce(call, given, reduction, keeps=keeps)
        if len(tensors) == 1:
            write(tensors[0], found, call.name("of all", 0))
            return
        parts = cut(joined(found), [tensor.numel() for tensor in tensors])
        for i, (tensor, elements) in enumerate(zip(tensors, parts, strict=True)):
            write(tensor, elements, call.name("of all", i))

    text = _text(f"all_reduce ({reduction.name})", dtype, sum(t.numel() for t in tensors))
    return launch(group, text, async_op, list(tensors), task, replacement)


def broadcast_(
    tensors: Tensors, group: Any, root: int, root_tensor: int = 0, async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Replace the tensor by that of the root."""
    tensor: Tensor = _one("broadcast", tensors)
    dtype = _check("broadcast", tensors)

    def task(call: Call) -> None:
        if call.rank == root:
            exchange.broadcast(call, read(call.group, [tensor], call.names("of", root)), root)
        else:
            found = exchange.broadcast(call, like(dtype, tensor.numel()), root)
            write(tensor, found, call.name("of", root, 0))

    text = _text(f"broadcast from rank {root}", dtype, tensor.numel())
    return list(tensors), launch(group, text, async_op, list(tensors), task)


def allgather_(
    outputs: Sequence[Tensors], inputs: Tensors, group: Any, async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[list[Tensor]], Any]:  # fmt: skip
    """Gather the tensors of all ranks in a list; those of ranks may differ in size."""
    into: Tensors = _one("all_gather", outputs)
    _one("all_gather", inputs)
    work = allgather_coalesced_([[each] for each in into], inputs, group, async_op)
    return [list(into)], work


def allgather_coalesced_(
    outputs: Sequence[Tensors], inputs: Tensors, group: Any, async_op: bool = True
) -> Any:
    """Gather several tensors of all ranks; there is a list of outputs for each rank."""
    name = "all_gather"
    dtype = _check(name, [*inputs, *(tensor for each in outputs for tensor in each)])
    _sized(name, "the number of tensors to receive", len(outputs), unbox(group)[1].size)
    for each in outputs:
        _sized(name, "the number of tensors of a rank", len(each), len(inputs))
    expected = [[tensor.numel() for tensor in each] for each in outputs]

    def task(call: Call) -> None:
        given = read(call.group, inputs, call.names("of", call.rank))
        _sized(name, "the number of own elements", given.numel(), sum(expected[call.rank]))
        likes = [like(dtype, sum(sizes)) for sizes in expected]
        found = exchange.all_gather(call, given, likes)
        for rank, (each, elements) in enumerate(zip(outputs, found, strict=True)):
            parts = cut(elements, expected[rank])
            for i, (tensor, part) in enumerate(zip(each, parts, strict=True)):
                write(tensor, part, call.name("of", rank, i))

    text = _text(name, dtype, sum(map(sum, expected)))
    result = [tensor for each in outputs for tensor in each]
    return launch(group, text, async_op, result, task)


def _allgather_base_(
    output: Tensor, tensor: Tensor, group: Any, async_op: bool = True, timeout: int = -1
) -> tuple[Tensor, Any]:
    """Gather the tensors of all ranks into one."""
    return output, allgather_into_tensor_coalesced_([output], [tensor], group, async_op)


def allgather_into_tensor_coalesced_(
    outputs: Tensors, inputs: Tensors, group: Any, async_op: bool = True
) -> Any:
    """Gather the tensors of all ranks, for each input into one output."""
    name = "all_gather_into_tensor"
    dtype = _check(name, [*inputs, *outputs])
    _sized(name, "the number of outputs", len(outputs), len(inputs))
    size = unbox(group)[1].size
    sizes = [tensor.numel() for tensor in inputs]
    for output, count in zip(outputs, sizes, strict=True):
        _sized(name, "the number of elements to receive", output.numel(), count * size)

    def task(call: Call) -> None:
        given = read(call.group, inputs, call.names("of", call.rank))
        found = exchange.all_gather(call, given, [like(dtype, len(given))] * size)
        parts = zip(*(cut(each, sizes) for each in found), strict=True)
        for i, (output, part) in enumerate(zip(outputs, parts, strict=True)):
            write(output, torch.cat(part), call.name("of all", i))

    text = _text(name, dtype, sum(sizes))
    return launch(group, text, async_op, list(outputs), task)


def reduce_(
    tensors: Tensors, group: Any, op: Any, root: int, root_tensor: int = 0,
    async_op: bool = True, timeout: int = -1,
) -> Any:  # fmt: skip
    """Replace the root's tensor by the reduction over all ranks."""
    tensor: Tensor = _one("reduce", tensors)
    dtype = _check("reduce", tensors)
    reduction = _reduction("reduce", op, dtype)

    def task(call: Call) -> None:
        given = read(call.group, [tensor], call.names("of", call.rank))
        found = exchange.reduce(call, reduction.contribution(given), reduction, root)
        if call.rank == root:
            write(tensor, found, call.name("of all", 0))

    text = _text(f"reduce ({reduction.name}) to rank {root}", dtype, tensor.numel())
    return launch(group, text, async_op, list(tensors), task)


def reduce_scatter_(
    outputs: Tensors, inputs: Sequence[Tensors], group: Any, op: Any, async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Reduce a list of tensors, one for each rank; the sizes of ranks may differ."""
    name = "reduce_scatter"
    output: Tensor = _one(name, outputs)
    given: Tensors = _one(name, inputs)
    group_size = unbox(group)[1].size
    _sized(name, "the number of tensors to reduce", len(given), group_size)
    work = _reduce_scatter(name, [output], [list(given)], group, op, async_op)
    return list(outputs), work


def _reduce_scatter_base_(
    output: Tensor, tensor: Tensor, group: Any, op: Any, async_op: bool = True, timeout: int = -1
) -> tuple[Tensor, Any]:
    """Reduce a tensor, and give each rank its part of the result."""
    work = reduce_scatter_tensor_coalesced_([output], [tensor], group, op, async_op)
    return output, work


def reduce_scatter_tensor_coalesced_(
    outputs: Tensors, inputs: Tensors, group: Any, op: Any, async_op: bool = True,
    timeout: int = -1,
) -> Any:  # fmt: skip
    """Reduce tensors, and give each rank its parts of the results."""
    name = "reduce_scatter_tensor"
    _check(name, [*inputs, *outputs])
    _sized(name, "the number of outputs", len(outputs), len(inputs))
    size = unbox(group)[1].size
    for output, tensor in zip(outputs, inputs, strict=True):
        _sized(name, "the number of elements to reduce", tensor.numel(), output.numel() * size)
    return _reduce_scatter(name, outputs, [[tensor] for tensor in inputs], group, op, async_op)


def _reduce_scatter(
    name: str, outputs: Tensors, inputs: Sequence[Tensors], group: Any, op: Any, async_op: bool
) -> Any:
    """Reduce, for each output, what its inputs hold for each rank, one after the other."""
    dtype = _check(name, [*outputs, *(tensor for each in inputs for tensor in each)])
    reduction, own = _reduction(name, op, dtype), unbox(group)[1]
    size = own.size

    def shares(call: Call, number: int, each: Tensors) -> list[Tensor]:
        if len(each) == size > 1:
            return [
                read(own, [tensor], call.names("of", call.rank, number, to))
                for to, tensor in enumerate(each)
            ]
        whole = read(own, each, call.names("of", call.rank, number))
        return list(whole.chunk(size)) if len(whole) else [whole] * size

    def task(call: Call) -> None:
        of_ranks = zip(*(shares(call, *numbered) for numbered in enumerate(inputs)), strict=True)
        given = [reduction.contribution(joined(parts)) for parts in of_ranks]
        sizes = [output.numel() for output in outputs]
        _sized(name, "the number of own elements", given[call.rank].numel(), sum(sizes))
        found = exchange.reduce_scatter(call, given, like(dtype, sum(sizes)), reduction)
        for i, (output, elements) in enumerate(zip(outputs, cut(found, sizes), strict=True)):
            write(output, elements, call.name("for", call.rank, i))

    count = sum(tensor.numel() for each in inputs for tensor in each)
    text = _text(f"{name} ({reduction.name})", dtype, count)
    return launch(group, text, async_op, list(outputs), task)


def gather_(
    outputs: Sequence[Tensors], inputs: Tensors, group: Any, root: int, async_op: bool = True,
    timeout: int = -1,
) -> Any:  # fmt: skip
    """Gather the tensors of all ranks on the root."""
    name = "gather"
    tensor: Tensor = _one(name, inputs)
    own = unbox(group)[1]
    into = list(_one(name, outputs)) if own.rank == root else []
    dtype = _check(name, [tensor, *into])
    if own.rank == root:
        _sized(name, "the number of tensors to receive", len(into), own.size)

    def task(call: Call) -> None:
        likes = [like(dtype, each.numel()) for each in into]
        given = read(call.group, [tensor], call.names("of", call.rank))
        found = exchange.gather(call, given, likes, root)
        for rank, (each, elements) in enumerate(zip(into, found, strict=True)):
            write(each, elements, call.name("of", rank, 0))

    text = _text(f"{name} to rank {root}", dtype)
    return launch(group, text, async_op, into, task)


def scatter_(
    outputs: Tensors, inputs: Sequence[Tensors], group: Any, root: int, async_op: bool = True,
    timeout: int = -1,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Give each rank one of the root's tensors."""
    name = "scatter"
    output: Tensor = _one(name, outputs)
    own = unbox(group)[1]
    given = list(_one(name, inputs)) if own.rank == root else []
    dtype = _check(name, [output, *given])
    if own.rank == root:
        _sized(name, "the number of tensors to send", len(given), own.size)

    def task(call: Call) -> None:
        parts = [read(own, [each], call.names("for", to)) for to, each in enumerate(given)]
        found = exchange.scatter(call, parts, like(dtype, output.numel()), root)
        write(output, found, call.name("for", call.rank, 0))

    text = _text(f"{name} from rank {root}", dtype)
    return list(outputs), launch(group, text, async_op, list(outputs), task)


def alltoall_(
    outputs: Tensors, inputs: Tensors, group: Any, async_op: bool = True, timeout: int = -1
) -> tuple[list[Tensor], Any]:
    """Give each rank one tensor, and receive one from each."""
    name = "all_to_all"
    dtype = _check(name, [*inputs, *outputs])
    size = unbox(group)[1].size
    _sized(name, "the number of tensors to send", len(inputs), size)
    _sized(name, "the number of tensors to receive", len(outputs), size)

    def task(call: Call) -> None:
        likes = [like(dtype, output.numel()) for output in outputs]
        given = [
            read(call.group, [tensor], call.names("of", call.rank, to))
            for to, tensor in enumerate(inputs)
        ]
        found = exchange.all_to_all(call, given, likes)
        for rank, (output, elements) in enumerate(zip(outputs, found, strict=True)):
            write(output, elements, call.name("of", rank, call.rank, 0))

    return list(outputs), launch(group, _text(name, dtype), async_op, list(outputs), task)


def alltoall_base_(
    output: Tensor, tensor: Tensor, group: Any, output_sizes: Sequence[int],
    input_sizes: Sequence[int], async_op: bool = True, timeout: int = -1,
) -> Any:  # fmt: skip
    """Give each rank some rows of a tensor, and receive rows from each."""
    name = "all_to_all_single"
    dtype = _check(name, [tensor, output])
    size = unbox(group)[1].size
    taken, given = _rows(name, output, output_sizes, size), _rows(name, tensor, input_sizes, size)

    def task(call: Call) -> None:
        likes = [like(dtype, count) for count in taken]
        parts = cut(read(call.group, [tensor], call.names("of", call.rank)), given)
        found = torch.cat(exchange.all_to_all(call, parts, likes))
        write(output, found, call.name("for", call.rank))

    return launch(group, _text(name, dtype), async_op, [output], task)


def _rows(name: str, tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the number of elements for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(f"{name}: {rows} rows cannot be divided among {ranks} ranks")
        sizes = [rows // ranks] * ranks
    _sized(name, "the number of sizes", len(sizes), ranks)
    _sized(name, "the sum of sizes", sum(sizes), rows)
    return [each * (tensor.numel() // rows if rows else 0) for each in sizes]


def send(tensors: Tensors, group: Any, to: int, tag: int) -> Any:
    """Send a tensor to one rank."""
    tensor: Tensor = _one("send", tensors)
    dtype = _check("send", tensors)
    process_group, own = unbox(group)
    header = Header(FrameKind.message, number=tag, text=_text("a tensor", dtype, tensor.numel()))
    with torch.inference_mode():
        own.send(to, header, read(own, [tensor]))
    completion = Completion([tensor], own)
    completion.settle([tensor])
    note(process_group, completion)
    return completion.work()


def recv_(tensors: Tensors, group: Any, source: int, tag: int) -> Any:
    """Receive a tensor from one rank."""
    tensor: Tensor = _one("recv", tensors)
    dtype = _check("recv", tensors)
    process_group, own = unbox(group)
    text, completion = _text("a tensor", dtype, tensor.numel()), Completion([tensor], own)

    def execute() -> None:
        with torch.inference_mode():
            frame = own.receive(source, FrameKind.message, tag)
            if frame.header.text != text:
                raise distributed.DistBackendError(
                    f"{own!r}: rank {source} sends {frame.header.text}, and rank {own.rank} "
                    f"receives {text}"
                )
            write(tensor, as_type(frame.content, like(dtype, 0)))

    own.lane((source, tag)).submit(settling(execute, completion, [tensor]))
    note(process_group, completion)
    return completion.work()


def barrier(
    tensor: Tensor, group: Any, devices: Sequence[int], async_op: bool = True, timeout: int = -1
) -> Any:
    """Wait until all ranks have called, and their devices have executed what was issued before."""

    def task(call: Call) -> None:
        torch.cuda.synchronize()
        exchange.barrier(call)

    return launch(group, "barrier", async_op, [], task)


_KERNELS: tuple[Callable[..., Any], ...] = (
    allreduce_,
    allreduce_coalesced_,
    broadcast_,
    allgather_,
    allgather_coalesced_,
    _allgather_base_,
    allgather_into_tensor_coalesced_,
    reduce_,
    reduce_scatter_,
    _reduce_scatter_base_,
    reduce_scatter_tensor_coalesced_,
    gather_,
    scatter_,
    alltoall_,
    alltoall_base_,
    send,
    recv_,
    barrier,
)


def install() -> Any:
    """Register the kernels; return the library, which keeps them registered."""
    make: Any = torch.library.Library
    library = make("c10d", "IMPL")
    with warnings.catch_warnings():
        # They replace torch's kernels, which need NCCL; torch warns about the first.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for kernel in _KERNELS:
            library.impl(kernel.__name__, kernel, "CUDA")
    install_coalescing()
    return library
