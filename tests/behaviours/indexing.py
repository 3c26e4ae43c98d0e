"""Reading and writing parts of tensors."""

from __future__ import annotations

import warnings

import torch

from tests.behaviours.comparison import behaviour, gradients, normal, whole


@behaviour
def reading_by_masks(device: str) -> object:
    x = normal(device, 5, 7)
    # Results of several sizes: the cached size of an earlier call must not be used.
    return (
        [x[x > least] for least in (0.0, 0.5, -1.0, 9.0)],
        [x[x[:, 0] > 0], x[:, x[0] > 0], x[x > 0, None], x.masked_select(x > 0.3)],
        [(x > 0).nonzero(), *(x > 0).nonzero(as_tuple=True), torch.argwhere(x > 1), x.nonzero()],
    )


@behaviour
def reading_by_indices(device: str) -> object:
    x, rows = normal(device, 5, 7), whole(device, 3, below=5)
    return (
        [x[rows], x[:, rows], x[rows, rows], x[rows[:, None], rows], x[rows, 1:3], x[..., rows]],
        [x[[0, 2]], x[torch.tensor([0, 2])], x[-rows], x[2], x[1, 2], x[1:4:2], x[None, :, None]],
        [x[rows.int()], x[rows, :2, None], x.take(rows), x.index_select(1, rows), x[::2, ::3]],
        [torch.take_along_dim(x, x.argsort(1), 1), x.gather(1, (x > 0).long()), x.select(1, 2)],
    )


@behaviour
def writing_by_masks(device: str) -> object:
    x = normal(device, 5, 7)
    a, b, c, d = (x.clone() for _ in range(4))
    a[a > 0] = 5
    b[b > 0] = b[b > 0] * 2
    c[:, c[0] > 0] = torch.tensor(1.0)
    d.masked_fill_(d < 0, -1)
    return a, b, c, d, x.masked_scatter(x > 0, torch.arange(35.0, device=device))


@behaviour
def writing_by_indices(device: str) -> object:
    x, rows = normal(device, 5, 7), torch.tensor([0, 2, 3], device=device)
    a, b, c = (x.clone() for _ in range(3))
    a[1:3, ::2] = torch.ones(2, 4, device=device)
    a[0] = 7
    a[rows, 1] = torch.arange(3.0, device=device)
    b[rows] += 1
    b[[0, 1], [2, 3]] = 9
    c.index_put_((rows,), torch.ones(3, 7, device=device), accumulate=True)
    c[..., -1] = x[:, 0]
    return a, b, c


@behaviour
def adding_and_copying_by_index(device: str) -> object:
    x, rows = normal(device, 5, 7), torch.tensor([4, 0, 4], device=device)
    y = normal(device, 3, 7)
    warnings.filterwarnings("ignore", "index_reduce")  # the warning that it is in beta
    return (
        [x.index_add(0, rows, y, alpha=2), x.index_copy(0, rows[:2], y[:2])],
        [x.index_fill(0, rows, 3.0), x.put(rows, y[0, :3]), x.put(rows, y[0, :3], accumulate=True)],
        [x.index_reduce(0, rows, y, how) for how in ("prod", "mean", "amax", "amin")],
    )


@behaviour
def scattering(device: str) -> object:
    x, where = normal(device, 5, 7), whole(device, 5, 7, below=5)
    zeros = torch.zeros(5, 7, device=device)
    return (
        [zeros.scatter(0, where[:1], x), zeros.scatter(1, where[:, :1], 3.0)],
        [zeros.clone().scatter_add_(0, where, x), zeros.scatter(0, where, 1.5, reduce="add")],
        {
            f"{how} {own}": x.scatter_reduce(0, where, x * 2, how, include_self=own)
            for how in ("sum", "prod", "mean", "amax", "amin")
            for own in (True, False)
        },
        [zeros.slice_scatter(x[:2], 0, 1, 3), zeros.select_scatter(x[0], 0, 2)],
        [zeros.diagonal_scatter(x[0, :5]), torch.nn.functional.one_hot(where)],
    )


@behaviour
def gradients_of_indexing(device: str) -> object:
    x, rows = normal(device, 5, 7).requires_grad_(), whole(device, 6, below=5)
    where = whole(device, 5, 7, below=5)
    return (
        [gradients(x[rows], x), gradients(x[x > 0], x), gradients(x[1:3, ::2], x)],
        [gradients(x.gather(0, where), x), gradients(x.index_select(0, rows), x)],
        gradients(x.scatter_reduce(0, where, x * 2, "amax"), x),
        gradients(torch.zeros_like(x).index_add(0, rows[:5], x), x),
        gradients(x.masked_select(x > 0.2), x),
    )


@behaviour
def padding_and_triangles(device: str) -> object:
    x = normal(device, 5, 7)
    pad = torch.nn.functional.pad
    return (
        [pad(x, (1, 2)), pad(x, (1, -1, 2, 0), value=3), pad(x[None], (1, 2), "circular")],
        [pad(x[None], (1, 2), "reflect"), pad(x[None, None], (1, 2, 3, 4), "replicate")],
        [x.tril(), x.triu(1), torch.tril_indices(3, 3, device=device), x.diag(), x[0].diag()],
        [torch.diag_embed(x), torch.diagflat(x[0], 1), x.trace(), torch.vander(x[0])],
    )


@behaviour
def grouping_rows(device: str) -> object:
    x, times = normal(device, 4, 3), torch.tensor([2, 0, 3, 1], device=device)
    return (
        [x.repeat_interleave(2, 0), x.repeat_interleave(times, 0), times.repeat_interleave(times)],
        [torch.cartesian_prod(times, times), torch.combinations(times), x.repeat(2, 1, 3)],
        [torch.nn.utils.rnn.pad_sequence([x[0], x[1, :2]], batch_first=True)],
        torch.meshgrid(times, times[:2], indexing="ij"),
    )
