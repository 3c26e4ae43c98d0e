"""Run random programs on the CPU and on the device, and compare every tensor that they make.

``random_tensors.py FIRST COUNT``, under a device session; prints one JSON object: how many
``steps`` succeeded and how many were ``refused``, by both devices alike, and what ``differs``.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn import functional

STEPS = 20
TENSORS_MAX, ELEMENTS_MAX, DIMENSIONS_MAX = 8, 2000, 6
REAL = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*REAL, torch.float16, torch.complex64, torch.bool, torch.uint8, torch.int32, torch.int64)


@dataclass
class Drawn:
    """Operands of a step: two tensors, two dimensions of the first one, and a small number."""

    t: Tensor
    u: Tensor
    d: int
    e: int
    n: int
    dtype: torch.dtype
    order: Sequence[int]

    def index(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.t.device)


Step = Callable[[Drawn], Tensor]


def assign(to: Tensor, value: Tensor | float) -> Tensor:
    to[..., 0] = value
    return to


#: Differentiable operators; of tensors that need gradients, only copies are changed.
PURE: tuple[Step, ...] = (
    lambda x: x.t.transpose(x.d, x.e),
    lambda x: x.t.unsqueeze(x.d),
    lambda x: x.t.squeeze(x.d),
    lambda x: x.t.reshape(-1),
    lambda x: x.t.view(-1),
    lambda x: x.t.permute(*x.order),
    lambda x: x.t.flip(x.d),
    lambda x: x.t.select(x.d, x.n),
    lambda x: x.t.narrow(x.d, 0, x.n),
    lambda x: x.t.expand(2, *x.t.shape),
    lambda x: x.t[..., ::2],
    lambda x: x.t.chunk(2, x.d)[-1],
    lambda x: x.t.unfold(x.d, 2, 1),
    lambda x: x.t.diagonal(),
    lambda x: x.t.roll(1, x.d),
    lambda x: x.t.contiguous(),
    lambda x: x.t.to(x.dtype),
    lambda x: x.t.conj(),
    lambda x: x.t.detach(),
    lambda x: x.t + x.u,
    lambda x: x.t - 2 * x.u,
    lambda x: x.t * x.u,
    lambda x: x.t / (x.u.abs() + 1),
    lambda x: x.t @ x.u,
    lambda x: x.t**2,
    lambda x: x.t.sin(),
    lambda x: x.t.abs().sqrt(),
    lambda x: x.t.clamp(-1, 1),
    lambda x: x.t.sum(x.d),
    lambda x: x.t.mean(x.d, keepdim=True),
    lambda x: x.t.amax(x.d),
    lambda x: x.t.var(x.d),
    lambda x: x.t.prod(x.d),
    lambda x: x.t.cumsum(x.d),
    lambda x: x.t.norm(),
    lambda x: x.t.softmax(x.d),
    lambda x: x.t.log_softmax(x.d),
    lambda x: x.t.logsumexp(x.d),
    lambda x: x.t.sort(x.d).values,
    lambda x: x.t.topk(1, x.d).values,
    lambda x: x.t.tril(),
    lambda x: torch.cat([x.t, x.u], x.d),
    lambda x: torch.stack([x.t, x.t * 2], x.d),
    lambda x: torch.where(x.t.real > 0, x.t, x.u),
    lambda x: x.t.masked_fill(x.t.real > 0, 2),
    lambda x: x.t.index_select(x.d, x.index(0, 0)) if x.t.numel() else x.t,
    lambda x: x.t[x.index(0, 0)] if x.t.numel() else x.t,
    lambda x: functional.layer_norm(x.t, x.t.shape[-1:]),
    lambda x: functional.gelu(x.t),
    lambda x: functional.linear(x.t, x.u),
    lambda x: functional.mse_loss(x.t, x.u),
    lambda x: functional.pad(x.t, (1, 1)),
    lambda x: torch.einsum("...i,...i->...", x.t, x.u),
    lambda x: x.t.clone().add_(x.u),
    lambda x: assign(x.t * 1, 2.5),
    lambda x: assign(x.t * 1, x.u),
)
CHANGING: tuple[Step, ...] = (
    lambda x: x.t.add_(x.u),
    lambda x: x.t.mul_(x.n),
    lambda x: x.t.copy_(x.u),
    lambda x: x.t.fill_(x.n),
    lambda x: x.t.masked_fill_(x.u == 0, 1),
    lambda x: assign(x.t, x.n),
    lambda x: assign(x.t, x.u),
    lambda x: x.t[x.t.real > 0],
    lambda x: x.t.nonzero(),
    lambda x: x.t.argmax(x.d),
    lambda x: x.t // x.u,
    lambda x: x.t == x.u,
    lambda x: x.t.logical_not(),
)


def made(random_: random.Random, device: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    size = [random_.randint(random_.random() > 0.05, 4) for _ in range(random_.randint(0, 4))]
    generator = torch.Generator().manual_seed(random_.getrandbits(30))
    return (3 * torch.randn(size, generator=generator)).to(random_.choice(dtypes)).to(device)


def bits(tensor: Tensor) -> list[object]:
    """Return geometry and values; strides of one element mean nothing."""
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    return [tuple(tensor.shape), str(tensor.dtype), strides, repr(values.tolist())]


def run(seed: int, device: str) -> list[list[object]]:
    """Return what each step of a random program computes, or the name of its exception."""
    draw = random.Random(seed)
    differentiable = seed % 2 == 1
    tensors = [made(draw, device, REAL if differentiable else DTYPES) for _ in range(4)]
    leaves = [each.requires_grad_() for each in tensors] if differentiable else []
    steps, found = PURE if differentiable else PURE + CHANGING, []
    for number in range(STEPS):
        draw = random.Random(f"{seed} {number}")
        t, u = draw.choice(tensors), draw.choice(tensors)
        d, e = (draw.randint(-t.dim(), t.dim() - 1) if t.dim() else 0 for _ in range(2))
        order = draw.sample(range(t.dim()), t.dim())
        drawn = Drawn(t, u, d, e, draw.randint(0, 3), draw.choice(DTYPES), order)
        try:
            result = draw.choice(steps)(drawn)
            found.append(bits(result))
        except Exception as error:
            found.append([type(error).__name__])
            continue
        if result.numel() <= ELEMENTS_MAX and result.dim() <= DIMENSIONS_MAX:
            tensors = [*tensors, result][-TENSORS_MAX:]
    if differentiable:
        try:
            parts = [each.real.float().sum() for each in tensors if each.requires_grad]
            grads = torch.autograd.grad(torch.stack(parts).sum(), leaves, allow_unused=True)
            found += [["none"] if each is None else bits(each) for each in grads]
        except Exception as error:
            found.append([type(error).__name__])
    return found


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    assert torch.zeros(1, device="cuda").is_cuda
    steps = refused = 0
    differs = []
    for seed in range(first, first + count):
        here, there = run(seed, "cpu"), run(seed, "cuda")
        steps += sum(len(each) > 1 for each in here)
        refused += sum(len(each) == 1 for each in here)
        pairs = enumerate(zip_longest(here, there))
        differs += [[seed, *each] for each in pairs if each[1][0] != each[1][1]][:1]
    print(json.dumps({"steps": steps, "refused": refused, "differs": differs}))


if __name__ == "__main__":
    main()
