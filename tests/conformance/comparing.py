"""Differences between the results of an operator on the CPU and on the proxied device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def differences(
    plain: Any, proxied: Any, where: str, *, values: bool = True, device: str = "cuda"
) -> Iterator[str]:
    """Describe each difference of two results, and where in the result it is.

    Parameters
    ----------
    values : bool
        Whether values are compared, not only geometry.
    device : str
        Required device of the proxied result if the plain one is on the CPU.
    """

    def inner(one: Any, other: Any, place: str) -> Iterator[str]:
        return differences(one, other, where + place, values=values, device=device)

    if isinstance(plain, torch.Tensor) or isinstance(proxied, torch.Tensor):
        if type(plain) is not type(proxied):
            yield f"{where}: {type(plain).__name__} became {type(proxied).__name__}"
            return
        yield from (f"{where}: {text}" for text in _of_tensors(plain, proxied, values, device))
    elif isinstance(plain, Mapping):
        if not isinstance(proxied, Mapping) or list(plain) != list(proxied):
            yield f"{where}: other keys"
            return
        for key in plain:
            yield from inner(plain[key], proxied[key], f"[{key!r}]")
    elif isinstance(plain, (list, tuple)):
        if type(plain) is not type(proxied) or len(plain) != len(proxied):
            yield f"{where}: {type(plain).__name__} of {len(plain)} became {proxied!r:.80}"
            return
        for index, (one, other) in enumerate(zip(plain, proxied, strict=True)):
            yield from inner(one, other, f"[{index}]")
    elif isinstance(plain, (float, complex)) and type(plain) is type(proxied):
        if values:
            same = torch.tensor(plain).isclose(torch.tensor(proxied), equal_nan=True)
            if not bool(same):
                yield f"{where}: {plain!r} became {proxied!r}"
    elif type(plain) is not type(proxied) or (values and plain != proxied):
        yield f"{where}: {plain!r} became {proxied!r}"


def aliasing(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[int]:
    """Return for each result the index of the earlier tensor with its storage (-1: none)."""
    seen: list[int] = [_storage_of(operand) for operand in operands]
    found = []
    for result in results:
        storage = _storage_of(result)
        found.append(seen.index(storage) if storage in seen else -1)
        seen.append(storage)
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return tensor.untyped_storage()._cdata


def _of_tensors(
    plain: torch.Tensor, proxied: torch.Tensor, values: bool, device: str
) -> Iterator[str]:
    expected = device if plain.device.type == "cpu" else plain.device.type
    if proxied.device.type != expected:
        yield f"is on {proxied.device}"
    for name in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(plain, name) != getattr(proxied, name):
            yield f"{name} {getattr(plain, name)} became {getattr(proxied, name)}"
    if plain.shape != proxied.shape or plain.dtype != proxied.dtype:
        return
    if plain.layout is torch.strided and proxied.layout is torch.strided:
        for name in ("stride", "storage_offset", "is_conj", "is_neg"):
            one, other = getattr(plain, name)(), getattr(proxied, name)()
            if one != other:
                yield f"{name} {one} became {other}"
    if not values or plain.device.type != "cpu":
        return
    try:
        one, other = dense(plain), dense(proxied)
    except NotImplementedError as error:
        yield f"cannot be read: {str(error).splitlines()[0]}"
        return
    if one.layout is torch.strided and _same_bytes(one, other):
        return
    try:
        torch.testing.assert_close(other, one, equal_nan=True, check_stride=False)
    except AssertionError as error:
        text = " ".join(line for line in str(error).splitlines() if line)
        yield f"values: {text[:200]}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain copy on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().cpu()


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    copies = [each.clone(memory_format=torch.contiguous_format) for each in (one, other)]
    flat = [each.flatten().view(torch.uint8) for each in copies]
    return torch.equal(*flat)
