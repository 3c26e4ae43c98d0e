"""A program: a function of a device, and the encoding of its results."""

from __future__ import annotations

import base64
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Program = Callable[[str], object]

#: Tolerances of losses and of values, for programs whose kernels differ from the CPU's.
ROUNDING = 1e-6

_programs: dict[str, tuple[Program, float, float]] = {}


def program(
    function: Program | None = None, *, relative: float = 0.0, tensors: float | None = None
) -> Any:
    """Register a function of a device, ``"cpu"`` or ``"cuda"``, under its name.

    It returns tensors, numbers, strings, or lists, tuples and dicts of such. Whole numbers, tokens
    among them, must be equal, and other numbers bit for bit.

    Parameters
    ----------
    relative : float
        Difference that is allowed of a number, relative to it; for programs that take another
        kernel on CUDA than on the CPU.
    tensors : float, optional
        The same for tensors, relative to the largest value of each, where they are the result of
        many steps that add to the difference; `relative` if not given.
    """
    if function is None:
        return lambda function: program(function, relative=relative, tensors=tensors)
    if function.__name__ in _programs:
        raise ValueError(f"two programs are called {function.__name__}")
    _programs[function.__name__] = (function, relative, relative if tensors is None else tensors)
    return function


def results(device: str) -> Iterator[dict[str, Any]]:
    """Run all programs; yield the JSON representation of the results of each."""
    for name, (function, relative, tensors) in _programs.items():
        torch.manual_seed(0)
        found: dict[str, Any] = {"name": name, "allowed": [relative, tensors], "error": ""}
        try:
            found["values"] = encoded(function(device))
        except Exception:
            found["error"] = traceback.format_exc()
        yield found


def encoded(value: Any) -> Any:
    """Encode a result as JSON: floats in hexadecimal, tensors as bytes.

    Raises
    ------
    TypeError
        If it has a type that a program may not return.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().resolve_conj()
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_complex():
            value = torch.view_as_real(value)
        # Exact for all narrower types.
        wide = value.to(torch.float64 if value.is_floating_point() else torch.int64)
        data = base64.b64encode(wide.numpy().tobytes()).decode()
        shape, number = list(value.shape), str(wide.dtype).removeprefix("torch.")
        return {"tensor": kind, "shape": shape, "wide": number, "data": data}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, Mapping):
        return {"items": {str(key): encoded(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [encoded(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"a program returned a {type(value).__name__}")


# -------------------------------------------------------------------- helpers of programs


def trained(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    *,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train a model by its own loss with AdamW, or another optimizer; return the losses."""
    chosen = optimizer or torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3
    )
    model.train()
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = loss_of()
        loss.backward()
        chosen.step()
        after()
        losses.append(loss.item())
    return losses


def tokens(*sizes: int, below: int = 120, seed: int = 3) -> torch.Tensor:
    """Make random tokens above the special ones, on the CPU and the same everywhere."""
    return torch.randint(5, below, sizes, generator=torch.Generator().manual_seed(seed))


def noise(*sizes: int, seed: int = 3) -> torch.Tensor:
    """Make random values on the CPU, the same everywhere."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def network(device: str, inputs: int = 8, outputs: int = 3, dropout: float = 0.0) -> nn.Module:
    """Make a small network of linear layers, the same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout),
        nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs),
    ).to(device)  # fmt: skip


def convolutions(device: str, outputs: int = 4) -> nn.Module:
    """Make a small network of convolutions, the same everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8),
        nn.ReLU6(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, outputs),
    ).to(device)  # fmt: skip
