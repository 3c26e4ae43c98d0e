"""Views, strides, copies and creation of tensors."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch

from tests.behaviours.comparison import behaviour, normal, refusal, whole


@behaviour
def views(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x.t(), x[None].expand(3, 5, 7), x.unfold(1, 3, 2), x.as_strided((2, 2), (1, 2), 3)],
        [x.diagonal(), x.permute(1, 0), x.view(7, 5), x.reshape(-1)[3:], x.mT, x.movedim(0, 1)],
        [x.narrow(1, 2, 3), x.unflatten(1, (7, 1)), x.flatten(), x.squeeze(), x.expand_as(x)],
        [*x.split(2), *x.chunk(3, 1), *x.unbind(1), *x.tensor_split(3), *x.split([1, 4])],
        [x.view(torch.int32), x.view_as(x), x.t().contiguous(), x.swapaxes(0, 1).reshape(35)],
    )


@behaviour
def writing_through_views(device: str) -> object:
    x = normal(device, 5, 7)
    x.t()[0].fill_(1)
    x.view(-1)[::4] *= 2
    x.diagonal().zero_()
    x[1:3].copy_(x[3:5])
    x.unfold(1, 2, 3)[:, 0] += 1
    x.expand(5, 7)[4].neg_()
    torch.add(x[0], 1, out=x[1])
    x.as_strided((3,), (8,)).sub_(5)
    x.chunk(2)[1].relu_()
    x[:, 2:5].t().mul_(torch.arange(5.0, device=device))
    return x


@behaviour
def views_changed_in_place(device: str) -> object:
    found = []
    for _ in range(3):
        y = normal(device, 5, 7)
        y.t_()
        y.unsqueeze_(0)
        y.squeeze_(0)
        y.transpose_(0, 1)
        found.append(y.clone())
        y.resize_(3, 3)
        found.append(y)
    return found


@behaviour
def overlapping_memory(device: str) -> object:
    x = normal(device, 7)
    wide = x.expand(3, 7)
    shifted = x.clone()
    shifted[1:] = shifted[:-1].clone()
    return (
        [wide + 1, wide.sum(), wide.contiguous(), wide.clone(), wide.t() @ wide, shifted],
        [refusal(lambda: wide.add_(1)), refusal(lambda: x.view(2, 2))],
        torch.as_strided(x, (5, 3), (1, 1)).sum(1),
    )


@behaviour
def joining(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [torch.cat([x, x]), torch.cat([x, x.half()], 1), torch.stack([x, x], 1)],
        [torch.hstack([x, x]), torch.vstack([x, x]), torch.dstack([x, x])],
        [torch.column_stack([x[:, 0], x]), torch.block_diag(x, x[:2], x[0])],
        torch.cat([x.to(memory_format=torch.contiguous_format), torch.zeros(0, device=device)]),
        torch.cat([x.t(), x.t()]),
    )


@behaviour
def turning(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x.roll(2, 1), x.roll((1, 2), (0, 1)), x.flip(0), x.flip((0, 1)), x.fliplr(), x.rot90()],
        [x.tile(2, 3), x.repeat(3, 1, 1), x.broadcast_to(2, 5, 7), *torch.broadcast_tensors(x, x)],
    )


@behaviour
def memory_formats(device: str) -> object:
    x = normal(device, 2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    deep = normal(device, 2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    return (
        [last, last + 1, last * x, torch.relu(last), last.clone(), last.contiguous(), last[0]],
        [torch.empty_like(last).zero_(), last.half(), last.sum(1), last.permute(0, 2, 3, 1)],
        [last.is_contiguous(), last.is_contiguous(memory_format=torch.channels_last)],
        [deep, deep.exp(), x.permute(0, 2, 3, 1) + 1, torch.cat([last, last], 1)],
    )


@behaviour
def elementwise_results_keep_strides(device: str) -> object:
    x = normal(device, 5, 7, 3)
    views = (x.t() if x.dim() == 2 else x.permute(2, 0, 1), x[:, ::2], x.expand(2, 5, 7, 3))
    return [
        [view + 1, view * view, view > 0, view.exp(), view.softmax(-1), torch.zeros_like(view)]
        for view in views
    ]


@behaviour
def outputs_that_are_given(device: str) -> object:
    x = normal(device, 5, 7)
    small = torch.empty(2, 2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that resizing is deprecated
        torch.mul(x, 2, out=small)
    wide = torch.zeros(5, 14, device=device)
    torch.exp(x, out=wide[:, ::2])
    values, places = torch.empty(0, device=device), torch.empty(0, device=device, dtype=torch.long)
    return (
        torch.add(x, 1, out=torch.empty(0, device=device)),
        torch.mul(x, 2, out=torch.zeros(7, 5, device=device).t()),
        [small, wide, torch.max(x, 1, out=(values, places))],
        torch.matmul(x, x.T, out=torch.empty(5, 5, device=device)),
        torch.sum(x, 0, out=torch.empty(7, device=device, dtype=torch.float64)),
    )


@behaviour
def copies_between_host_and_device(device: str) -> object:
    x = torch.randn(5, 7)
    there = x.to(device)
    return (
        [x.t().to(device), x[:, ::2].to(device).contiguous(), x.expand(3, 5, 7).to(device) + 0],
        [there.t().cpu().tolist(), there[:, ::2].cpu().tolist(), there.expand(2, 5, 7).tolist()],
        [x.to(device, torch.half), x.to(device, non_blocking=True), there.to(device) is there],
        [there.cpu().stride(), there.t().cpu().stride()],
        there.numpy(force=True).tolist(),
        torch.empty(7, 5).t().copy_(there).tolist(),
        torch.empty(5, 7, dtype=torch.float64).copy_(there).tolist(),
        torch.from_numpy(np.arange(6).reshape(2, 3)[:, ::-1].copy()).to(device),
    )


@behaviour
def copies_that_broadcast(device: str) -> object:
    x = torch.zeros(3, 4, device=device)
    x.copy_(torch.tensor(3.0))
    x[0].copy_(torch.ones(1))
    x[1:].copy_(torch.arange(4))
    x.t()[2].copy_(torch.ones(3, dtype=torch.float64))
    return x


@behaviour
def new_tensors(device: str) -> object:
    like = normal(device, 2, 3)
    return (
        [torch.arange(5, device=device), torch.arange(0, 1, 0.1, device=device)],
        [torch.linspace(0, 1, 5, device=device), torch.logspace(0, 2, 3, device=device)],
        [
            torch.eye(3, device=device),
            torch.full((2,), 3, device=device),
            torch.ones((), device=device),
        ],
        [torch.tensor([1, 2], device=device), torch.tensor([[1.5], [2]], device=device)],
        [torch.as_tensor(np.float32(3), device=device), torch.tensor(True, device=device)],
        [like.new_zeros(2), like.new_tensor([1, 2]), like.new_full((2,), 7), like.new_ones(1, 2)],
        [
            torch.zeros_like(like, dtype=torch.int),
            torch.ones_like(like),
            torch.empty(0, device=device),
        ],
        [torch.hann_window(8, device=device), torch.hamming_window(5, device=device)],
        [torch.triu_indices(3, 4, device=device), torch.zeros(2, 0, 3, device=device)],
        torch.empty_strided((2, 3), (1, 2), device=device).zero_(),
    )


@behaviour
def empty_tensors(device: str) -> object:
    x = torch.zeros(0, 3, device=device)
    return (
        [x + 1, x.sum(), x.sum(0), x @ x.t(), x.t() @ x, torch.cat([x, x]), x[x > 0], x.mean(0)],
        [x.view(3, 0), x.unique(), x.nonzero(), x.sort(1).values, x.tolist(), x.numel()],
        torch.nn.functional.linear(x, torch.ones(2, 3, device=device)),
    )


@behaviour
def tensors_as_python_values(device: str) -> object:
    x, n = normal(device, 3, 2), whole(device, 4, below=9)
    return (
        [x.tolist(), n.tolist(), x[0, 0].item(), float(x.sum()), int(n[0]), bool(x[0, 0] > 9)],
        [len(x), [row.tolist() for row in x], n[0] in n, list(range(9))[n[1]], f"{x[0, 0]:.3f}"],
        [x.half().sum().item(), complex(x[0, 0]), (x > 0).tolist(), x.size(), x.dim(), x.nbytes],
        [x.untyped_storage().nbytes(), x.element_size(), x.storage_offset(), x[1].storage_offset()],
        [copy.copy(x).tolist(), copy.deepcopy(x).tolist(), x.is_shared() and device == "cpu"],
    )


@behaviour
def storages_are_shared_and_set(device: str) -> object:
    x = normal(device, 5, 7)
    y = torch.empty(0, device=device).set_(x)  # type: ignore[call-overload]  # which torch documents
    y[0] = 1
    z = torch.empty(0, device=device).set_(x.untyped_storage(), 7, (2, 3), (7, 1))
    z.zero_()
    w = torch.nn.Parameter(x)
    w.data = x * 2
    w.data[0] = 3
    return x, y, z, w.data, y.data_ptr() == x.data_ptr(), y.is_set_to(x)


@behaviour
def outputs_that_the_operator_lays_out(device: str) -> object:
    x = normal(device, 5, 1)
    reflected = torch.zeros(5, 1, device=device), torch.zeros(1, device=device)
    torch.geqrf(x, out=reflected)
    eigenvalues = torch.zeros(0, 2, dtype=torch.complex64, device=device).select(1, 0)
    torch.linalg.eigvals(torch.ones(0, 0, device=device), out=eigenvalues)
    modes = torch.zeros(5, device=device), torch.zeros(5, dtype=torch.long, device=device)
    torch.mode(x.expand(5, 3), out=modes)
    return reflected, eigenvalues, modes, torch.isin(1.0, torch.ones(3, device=device))


@behaviour
def conjugates_that_stay_lazy(device: str) -> object:
    x, y = (normal(device, 4, dtype=torch.complex64) for _ in range(2))
    found = [torch.vdot(x.conj(), y) for _ in range(2)]  # asked about, then known
    return found, [each.is_conj() for each in found], x.clone().conj_physical_()
