"""A behaviour: a function of a device, whose results must not depend on the device."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import nn

Behaviour = Callable[[str], object]

_behaviours: dict[str, tuple[Behaviour, float]] = {}


@overload
def behaviour(function: Behaviour) -> Behaviour: ...
@overload
def behaviour(*, relative: float) -> Callable[[Behaviour], Behaviour]: ...
def behaviour(function: Behaviour | None = None, *, relative: float = 0.0) -> Any:
    """Register a function of a device, ``"cpu"`` or ``"cuda"``, under its name.

    It returns tensors on that device, numbers, strings, or lists, tuples and dicts of such, all
    of which must be equal: values bit for bit (NaNs are equal), dtypes, shapes and strides.

    Parameters
    ----------
    relative : float
        Difference of values that is allowed, relative to the largest value of a tensor. For
        operators that torch computes with other kernels on CUDA than on the CPU, and which
        therefore round elsewhere.
    """
    if function is None:
        return partial(_register, relative=relative)
    return _register(function, relative)


def _register(function: Behaviour, relative: float) -> Behaviour:
    if function.__name__ in _behaviours:
        raise ValueError(f"two behaviours are called {function.__name__}")
    _behaviours[function.__name__] = (function, relative)
    return function


def compared() -> Iterator[tuple[str, str]]:
    """Run all behaviours; yield the name of each and its problem ("" if there is none)."""
    for name, (function, relative) in _behaviours.items():
        try:
            found = {device: _run(function, device) for device in ("cpu", "cuda")}
            differences = list(_differences("", found["cpu"], found["cuda"], relative))
            message = "\n".join(differences)
        except Exception:
            message = traceback.format_exc()
        yield name, message


def save(path: str, device: str, leave_out: Sequence[str]) -> None:
    """Run all behaviours, except those left out, on one device; write their results to a file."""
    found: dict[str, Any] = {}
    for name, (function, _) in _behaviours.items():
        if name in leave_out:
            continue
        try:
            found[name] = _on_host(_run(function, device))
        except Exception as error:
            found[name] = f"raised {type(error).__name__}: {error}"
    torch.save(found, path)


def compared_files(one: str, other: str, relative: float) -> Iterator[tuple[str, str]]:
    """Compare the saved results of two runs, like `compared`, with a minimum tolerance."""
    first, second = (torch.load(path, weights_only=False) for path in (one, other))
    for name, (_, allowed) in _behaviours.items():
        if name not in first and name not in second:
            continue
        if name not in first or name not in second:
            yield name, "was run on one side only"
            continue
        found = _differences("", first[name], second[name], max(allowed, relative), on="cpu")
        yield name, "\n".join(found)


def _on_host(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _host_copy(result)
    if isinstance(result, Mapping):
        return {key: _on_host(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)([_on_host(value) for value in result])
    return result


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host with its strides and its `requires_grad`."""
    detached = tensor.detach()
    copy = detached.cpu()
    if copy.stride() != detached.stride():
        copy = torch.empty_strided(detached.shape, detached.stride(), dtype=detached.dtype)
        copy.copy_(detached)
    return copy.requires_grad_(tensor.requires_grad)


def _run(function: Behaviour, device: str) -> object:
    torch.manual_seed(0)
    return function(device)


def _differences(
    where: str, plain: Any, proxied: Any, relative: float, on: str = "cuda"
) -> Iterator[str]:
    """Describe each difference between two results, and where in the result it is.

    The second one's tensors must be `on` that device.
    """
    if type(plain) is not type(proxied):
        yield f"{where}: {_kind(plain)} became {_kind(proxied)}"
    elif isinstance(plain, torch.Tensor):
        found = _tensor_differences(plain, proxied, relative, on)
        yield from (f"{where}: {text}" for text in found)
    elif isinstance(plain, Mapping):
        if list(plain) != list(proxied):
            yield f"{where}: keys {list(plain)} became {list(proxied)}"
        for key in plain.keys() & proxied.keys():
            yield from _differences(f"{where}[{key!r}]", plain[key], proxied[key], relative, on)
    elif isinstance(plain, (list, tuple)):
        if len(plain) != len(proxied):
            yield f"{where}: {len(plain)} results became {len(proxied)}"
        for index, (one, other) in enumerate(zip(plain, proxied, strict=False)):
            yield from _differences(f"{where}[{index}]", one, other, relative, on)
    elif isinstance(plain, float) and relative:
        if not math.isclose(plain, proxied, rel_tol=relative):
            yield f"{where}: {plain!r} became {proxied!r}"
    elif plain != proxied:
        yield f"{where}: {plain!r} became {proxied!r}"


def _kind(result: Any) -> str:
    """Describe a result that should have another type; texts are often errors."""
    return repr(result[:300]) if isinstance(result, str) else type(result).__name__


def _tensor_differences(
    plain: torch.Tensor, proxied: torch.Tensor, relative: float, on: str
) -> Iterator[str]:
    if proxied.device.type != on:
        yield f"is on {proxied.device}"
    for name in ("dtype", "shape", "requires_grad"):
        if getattr(plain, name) != getattr(proxied, name):
            yield f"{name} {getattr(plain, name)} became {getattr(proxied, name)}"
    if plain.shape != proxied.shape:
        return
    if plain.stride() != proxied.stride():
        yield f"strides {plain.stride()} became {proxied.stride()}"
    plain, proxied = plain.detach(), proxied.detach().cpu()
    allowed = 0.0
    compared = relative and plain.dtype != torch.bool
    sizes = plain.abs()[plain.isfinite()] if compared else torch.empty(0)
    if sizes.numel():
        allowed = relative * float(sizes.max())
    equal = torch.isclose(plain, proxied, rtol=0.0, atol=allowed, equal_nan=True)
    if not equal.all():
        first = tuple((~equal).nonzero()[0].tolist())
        values = f"{plain[first].item()!r} became {proxied[first].item()!r} at {first}"
        yield f"{int((~equal).sum())} of {equal.numel()} values differ: {values}"


# -------------------------------------------------------------------- helpers of behaviours


def normal(device: str, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make random values on the CPU, the same for every device, and move them."""
    return torch.randn(*sizes, dtype=dtype).to(device)


def whole(device: str, *sizes: int, below: int) -> torch.Tensor:
    """Make random integers on the CPU, the same for every device, and move them."""
    return torch.randint(below, sizes).to(device)


def flat(results: Any) -> list[torch.Tensor]:
    """Collect the tensors of a nest of lists and tuples."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, (list, tuple)):
        return [tensor for item in results for tensor in flat(item)]
    return []


def gradients(results: Any, *of: torch.Tensor) -> list[torch.Tensor | None]:
    """Differentiate the sum of the squares of all results."""
    loss = torch.stack([r.abs().square().sum() for r in flat(results) if r.requires_grad]).sum()
    return list(torch.autograd.grad(loss, of, allow_unused=True))


def passes(module: nn.Module, *inputs: Any, device: str) -> list[Any]:
    """Run a module forward and backward; return its results, all gradients and its buffers."""
    module.to(device)
    leaves = [
        each.detach().clone().requires_grad_()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
        else each
        for each in inputs
    ]
    results = module(*leaves)
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    grads = gradients(results, *wanted, *module.parameters())
    return [flat(results), grads, [buffer.clone() for buffer in module.buffers()]]


def refusal(function: Callable[[], object]) -> str:
    """Name the type of the exception that a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return "nothing was raised"
