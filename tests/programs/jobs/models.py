"""Small models of the kinds that people train with several ranks, and batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


class Decoder(nn.Module):
    """A block of a transformer, with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.project(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.norms[1](x))


class Gpt(nn.Module):
    """A small GPT-2."""

    def __init__(self, tokens: int = 64, width: int = 32, length: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Decoder(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)
    )


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def _vectors(chance: torch.Generator) -> Batch:
    return torch.randn(8, 16, generator=chance), torch.randint(4, (8,), generator=chance)


def _images(chance: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=chance), torch.randint(4, (4,), generator=chance)


def _texts(chance: torch.Generator) -> Batch:
    tokens = torch.randint(64, (4, 17), generator=chance)
    return tokens[:, :-1], tokens[:, 1:].flatten()


#: Models by name, each with a function that draws its batches on the host.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "mlp": (mlp, _vectors),
    "resnet": (resnet, _images),
    "gpt2": (Gpt, _texts),
    "fsdp2": (Gpt, _texts),
}
