"""Errors of unsupported calls."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from torch import distributed

from tests.surface.checking import check, refused


@check
def addresses_are_not_given_away() -> None:
    x = torch.ones(2, device="cuda")
    dlpack: Any = torch.utils.dlpack
    assert ".cpu()" in refused(lambda: x.__dlpack__(), BufferError)
    assert ".cpu()" in refused(lambda: dlpack.to_dlpack(x), BufferError)
    assert not hasattr(x, "__cuda_array_interface__")
    assert torch.from_dlpack(torch.ones(2)).sum().item() == 2  # type: ignore[attr-defined]


@check
def what_cannot_work_says_so() -> None:
    for function in (
        torch.cuda.memory_snapshot,
        torch.cuda.utilization,
        torch.cuda.current_blas_handle,
        lambda: torch.cuda.caching_allocator_alloc(10),
        lambda: torch.cuda.Event(interprocess=True),
        lambda: torch.cuda.ExternalStream(1234),
        lambda: torch.ones(2, device="cuda").untyped_storage()._share_cuda_(),
    ):
        assert "behind a device proxy" in refused(function), function
    assert not torch.cuda.is_current_stream_capturing()


@check
def collectives_of_one_rank_work_but_those_that_nccl_refuses() -> None:
    x, linear = torch.ones(2, device="cuda"), torch.nn.Linear(2, 2).cuda()
    assert distributed.is_nccl_available()
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/meeting"
        # gloo accepts CUDA tensors, too, in builds with CUDA.
        distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        try:
            distributed.all_reduce(torch.ones(2))
            distributed.all_reduce(x)
            distributed.broadcast(x, 0)
            distributed.all_gather([x.clone()], x)
            torch.nn.parallel.DistributedDataParallel(linear)(x[None]).sum().backward()
            assert "name the rank" in refused(lambda: distributed.recv(x), NotImplementedError)
        finally:
            distributed.destroy_process_group()
    assert x.sum().item() == 2


@check
def quantized_tensors_say_that_they_are_not_supported_yet() -> None:
    x = torch.eye(3)
    y = x.cuda()
    with warnings.catch_warnings():
        # The error of quantized tensors themselves.
        warnings.filterwarnings("ignore", ".*(prototype|deprecated)")
        for function in (
            lambda: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8),
            lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).cuda(),
        ):
            text = refused(function, NotImplementedError)
            assert "quantized tensors are not supported on a proxied device yet" in text, text
    assert y.sum().item() == 3


@check
def tensors_of_the_host_do_not_mix_with_those_of_the_device_but_as_indices() -> None:
    x, rows = torch.eye(3), torch.tensor([0, 2])
    y = x.cuda()
    for function in (
        lambda: x + y,
        lambda: torch.mm(x, y),
        lambda: torch.cat([y, x]),
        lambda: torch.nn.functional.linear(x, y),
        lambda: torch.nn.functional.embedding(rows, y),
        lambda: y.index_select(0, rows),
        lambda: y.index_add(0, rows, y[:2]),
        lambda: y.index_copy(0, rows, y[:2]),
        lambda: y.index_fill(0, rows, 1),
        lambda: y.gather(0, rows[None]),
        lambda: y.index_put((rows.cuda(),), x[:2]),
    ):
        text = refused(function, RuntimeError)
        assert "same device" in text, text
    assert y[rows].sum().item() == 2
    y[rows] = 2.0
    assert y.sum().item() == 13


@check
def sparse_tensors_of_the_host_do_not_mix_with_those_of_the_device() -> None:
    x = torch.eye(3)
    text = refused(lambda: torch.sparse.mm(x.to_sparse(), x.cuda()), RuntimeError)
    assert "same device" in text, text
