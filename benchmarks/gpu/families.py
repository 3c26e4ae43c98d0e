"""One small computation of each family of CUDA operators, with fixed inputs.

Run by both sides of a comparison: plain torch on a device, and the proxied one. Kernels that round
differently, choose another algorithm, or draw other random numbers show here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

Family = Callable[[torch.device], Sequence[torch.Tensor]]


def _randn(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def _matmul(device: torch.device) -> Sequence[torch.Tensor]:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return [
        _randn(256, 512, dtype=kind, device=device) @ _randn(512, 128, dtype=kind, device=device)
        for kind in kinds
    ]


def _convolution(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(4, 16, 32, 32, device=device).requires_grad_()
    layer = nn.Conv2d(16, 32, 3, padding=1).to(device)
    y = layer(x)
    y.square().mean().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


def _attention(dropout: float, dtype: torch.dtype, device: torch.device) -> Sequence[torch.Tensor]:
    parts = [_randn(2, 4, 64, 32, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    y = F.scaled_dot_product_attention(
        parts[0], parts[1], parts[2], dropout_p=dropout, is_causal=True
    )
    y.float().square().mean().backward()
    return [y.detach(), *(part.grad for part in parts if part.grad is not None)]


def _recurrent(device: torch.device) -> Sequence[torch.Tensor]:
    layer = nn.LSTM(32, 64, num_layers=2, dropout=0.2, batch_first=True).to(device)
    y, _ = layer(_randn(4, 12, 32, device=device))
    y.square().mean().backward()
    return [y.detach(), *(each.grad for each in layer.parameters() if each.grad is not None)]


def _indexing(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(100, 8, device=device)
    rows = torch.randint(100, (300,)).to(device)
    table = nn.Embedding(100, 8).to(device)
    table(rows).sum().backward()
    assert table.weight.grad is not None
    added = torch.zeros_like(x).index_put((rows,), _randn(300, 8, device=device), accumulate=True)
    return [x[rows], table.weight.grad, added, x.scatter_add(0, rows[:100, None].expand(-1, 8), x)]


def _searching(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(1000, device=device)
    return [
        x.sort().values, x.topk(10).indices, (x > 0).nonzero(), x.unique(), x.cumsum(0), x.argmax()
    ]  # fmt: skip


def _transforms(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(64, 64, device=device)
    signal = torch.fft.rfft2(x)
    return [torch.view_as_real(signal), torch.fft.irfft2(signal), (signal * signal.conj()).real]


def _algebra(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(48, 48, device=device)
    positive = x @ x.T + 48 * torch.eye(48, device=device)
    return [
        torch.linalg.cholesky(positive),
        torch.linalg.solve(positive, x),
        torch.linalg.inv(positive),
    ]


def _sparse(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(64, 64, device=device)
    return [(x * (x > 1)).to_sparse_csr() @ x, (x * (x > 1)).to_sparse() @ x]


def _optimizers(device: torch.device) -> Sequence[torch.Tensor]:
    results = []
    for fused in (False, True):
        layer = nn.Linear(32, 32).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, foreach=not fused, fused=fused)
        for _ in range(3):
            layer(_randn(8, 32, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(layer.weight.detach())
    return results


def _mixed_precision(device: torch.device) -> Sequence[torch.Tensor]:
    layer = nn.Linear(32, 32).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type)
    for _ in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            loss = layer(_randn(8, 32, device=device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [layer.weight.detach()]


def _randomness(device: torch.device) -> Sequence[torch.Tensor]:
    drawn = [torch.randn(1000, device=device), torch.rand(77, device=device)]
    drawn += [torch.randperm(50, device=device), torch.bernoulli(drawn[1])]
    generator = torch.Generator(device).manual_seed(9)
    state = generator.get_state()
    drawn.append(torch.randint(1000, (64,), generator=generator, device=device))
    generator.set_state(state)
    return [*drawn, torch.randint(1000, (64,), generator=generator, device=device)]


def _layers(device: torch.device) -> Sequence[torch.Tensor]:
    x = _randn(4, 8, 16, 16, device=device)
    norm = nn.BatchNorm2d(8).to(device)
    return [
        norm(x).detach(), norm.running_var, F.layer_norm(x, x.shape[1:]), F.max_pool2d(x, 2),
        F.interpolate(x, scale_factor=2.0, mode="bilinear"), F.softmax(x, 1), F.gelu(x),
        F.cross_entropy(x.flatten(1), torch.arange(4, device=device)),
    ]  # fmt: skip


FAMILIES: dict[str, Family] = {
    "matmul": _matmul,
    "convolution": _convolution,
    "attention bf16": lambda device: _attention(0.0, torch.bfloat16, device),
    "attention fp32": lambda device: _attention(0.0, torch.float32, device),
    "attention with dropout": lambda device: _attention(0.2, torch.bfloat16, device),
    "lstm with dropout": _recurrent,
    "indexing": _indexing,
    "searching": _searching,
    "fft": _transforms,
    "linear algebra": _algebra,
    "sparse": _sparse,
    "optimizers": _optimizers,
    "autocast and scaler": _mixed_precision,
    "random numbers": _randomness,
    "layers": _layers,
    "dropout": lambda device: [F.dropout(_randn(64, 64, device=device), 0.3)],
}


def compute(name: str, device: str) -> list[torch.Tensor]:
    """Compute a family on a device from fixed seeds; return the results on the CPU."""
    torch.manual_seed(0)
    return [each.detach().cpu() for each in FAMILIES[name](torch.device(device))]


def difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of two results, relative to the largest value of each tensor.

    0.0 means that all bits are equal; infinity that shapes or the places of NaN differ.
    """
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        first, second = a.double().flatten(), b.double().flatten()
        if not torch.equal(first.isnan(), second.isnan()):
            return float("inf")
        apart = (first - second).nan_to_num().abs()
        scale = first.nan_to_num().abs().max().clamp(min=1e-30) if first.numel() else 1.0
        largest = max(largest, float((apart / scale).max()) if apart.numel() else 0.0)
    return largest
