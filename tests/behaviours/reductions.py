"""Operators that combine many elements into one: sums, order, statistics."""

from __future__ import annotations

import warnings

import torch

from tests.behaviours.comparison import behaviour, gradients, normal, whole


@behaviour
def sums_and_means(device: str) -> object:
    x = normal(device, 5, 7, 3)
    return (
        [x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.mean(), x.mean(-1), x.prod(), x.prod(1)],
        [x.sum(dtype=torch.float64), (x > 0).sum(), (x > 0).sum(0), x.nansum(), x.nanmean(0)],
        [x.long().sum(), x.half().sum(0), torch.zeros(0, device=device).sum(), x.logsumexp(1)],
    )


@behaviour
def deviations_and_norms(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x.std(), x.std(1), x.var(0), x.var(0, correction=0), *torch.var_mean(x, 1)],
        [x.norm(), x.norm(1, dim=0), x.norm(float("inf")), torch.linalg.vector_norm(x, 3, dim=1)],
        [torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, "nuc"), x.renorm(2, 0, 1)],
        [torch.cov(x), torch.corrcoef(x), torch.dist(x, x + 1)],
    )


@behaviour
def largest_and_smallest(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x.max(), x.min(), *x.max(1), *x.min(0), x.argmax(), x.argmin(1), *x.aminmax()],
        [x.amax(1), x.amin((0, 1)), *x.cummax(1), *x.cummin(0), torch.maximum(x, x.flip(0))],
        [x.count_nonzero(), x.any(), x.all(1), (x > 0).any(0), (x > 0).all((0, 1))],
    )


@behaviour
def orders(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [*x.sort(1), *x.sort(0, descending=True), *x.sort(stable=True, dim=1), x.argsort(1)],
        [*x.topk(3), *x.topk(2, largest=False, dim=0), torch.msort(x)],
        [*x.kthvalue(2), *x.kthvalue(1, 0, keepdim=True), x.median(), *x.median(1), *x.mode()],
        [x.nanmedian(), *x.nanmedian(1), *whole("cpu", 50, below=4).to(device).mode()],
    )


@behaviour
def quantiles(device: str) -> object:
    x = normal(device, 5, 7)
    where = torch.tensor([0.1, 0.5, 0.9], device=device)
    return (
        [x.quantile(0.3), x.quantile(where), x.quantile(where, dim=1), x.nanquantile(0.5, 0)],
        [x.quantile(0.4, interpolation=i) for i in ("lower", "higher", "nearest", "midpoint")],
    )


@behaviour
def running_totals(device: str) -> object:
    x = normal(device, 5, 7)
    return (
        [x.cumsum(0), x.cumprod(1), x.logcumsumexp(0), (x > 0).cumsum(1), x.diff(), x.diff(dim=0)],
        [torch.trapezoid(x), torch.cumulative_trapezoid(x, dim=0), *torch.gradient(x)],
    )


@behaviour
def distinct_values(device: str) -> object:
    x = whole(device, 40, below=9)
    return (
        x.unique(),
        torch.unique(x, return_inverse=True, return_counts=True),
        torch.unique(x.view(20, 2), dim=0, return_inverse=True, return_counts=True),
        torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    )


@behaviour
def histograms(device: str) -> object:
    x = normal(device, 100)
    counts = whole(device, 50, below=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that histc is not deterministic
        drawn = torch.histc(x, 5, -2, 2)
    return (
        [drawn, torch.bincount(counts), torch.bincount(counts, minlength=10)],
        torch.bincount(counts, weights=x[:50]),
    )


@behaviour
def searches_in_sorted_values(device: str) -> object:
    edges, x = normal(device, 9).sort().values, normal(device, 5, 7)
    rows = normal(device, 5, 9).sort(1).values
    return (
        [torch.bucketize(x, edges), torch.bucketize(x, edges, right=True, out_int32=True)],
        [torch.searchsorted(edges, x), torch.searchsorted(rows, x, side="right")],
        [torch.searchsorted(edges, 0.3), torch.bucketize(0.2, edges)],
    )


@behaviour
def gradients_of_reductions(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    return [
        gradients(reduce(x), x)
        for reduce in (
            lambda x: [x.max(), x.max(1).values, x.amax(0), x.median(), x.kthvalue(2).values],
            lambda x: [x.std(), x.var(0), x.norm(), x.prod(1), x.cumprod(0), x.logsumexp(1)],
            lambda x: [x.sort(1).values, x.topk(2).values, x.quantile(0.3, dim=1), x.mode().values],
        )
    ]


@behaviour
def reductions_of_many_elements(device: str) -> object:
    x = normal(device, 300, 400)
    return x.sum(), x.mean(0), x.std(1), x.softmax(1), x.t().sum(0), x.double().sum()


@behaviour
def counts_of_whole_numbers(device: str) -> object:
    # CUDA counts whole numbers exactly; the CPU has only a kernel for floating-point ones.
    x = whole("cpu", 200, below=40)
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    found = []
    for bins, low, high in ((8, 0, 8), (5, 0, 40), (39, 0, 0), (3, 50, 50)):
        for kind in kinds:
            counted = x.to(device, kind if device == "cuda" else torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the warning that histc is not deterministic
                counts = torch.histc(counted, bins, low, high)
            assert device == "cpu" or counts.dtype == kind
            found.append(counts.to(torch.int64))
    return found
