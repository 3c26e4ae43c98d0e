"""Traces, exports and function transforms have the same results on the device as on the CPU.

Prints a line for each module and way whose result differs, and then how many agreed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

Tensors = tuple[torch.Tensor, ...]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> object:
        return self.function(*arguments)


def modules() -> Iterator[tuple[str, nn.Module, Tensors]]:
    """Return modules of operators that are sent whole, though torch decomposes them."""
    torch.manual_seed(0)
    image, series = torch.randn(2, 8, 10, 10), torch.randn(2, 5, 16)
    last = image.contiguous(memory_format=torch.channels_last)
    yield "conv1d", nn.Conv1d(8, 4, 3), (image[..., 0],)
    yield "conv2d", nn.Conv2d(8, 4, 3, padding=1), (image,)
    yield "depthwise", nn.Conv2d(8, 8, 3, groups=8), (image,)
    yield "conv3d", nn.Conv3d(4, 4, 3), (torch.randn(1, 4, 6, 6, 6),)
    yield "transposed", nn.ConvTranspose2d(8, 4, 3, stride=2), (image,)
    yield "group norm", nn.GroupNorm(2, 8), (last,)
    yield "layer norm", nn.LayerNorm(16), (series,)
    yield "batch norm", nn.BatchNorm2d(8), (image,)
    yield "lstm", nn.LSTM(16, 8, batch_first=True), (series,)
    yield "lstm cell", nn.LSTMCell(16, 8), (series[:, 0],)
    yield "gru", nn.GRU(16, 8, batch_first=True), (series,)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    yield "encoder", layer.eval(), (series,)
    yield "attention", Calls(lambda x: F.scaled_dot_product_attention(x, x, x)), (series[:, None],)
    yield "bag", nn.EmbeddingBag(10, 4, mode="sum"), (torch.randint(0, 10, (3, 4)),)
    yield "cdist", Calls(torch.cdist), (series, series + 1)
    yield "dist", Calls(torch.dist), (series, series + 1)
    yield "addr", Calls(torch.addr), (torch.randn(3, 4), torch.randn(3), torch.randn(4))
    yield "any", Calls(lambda x: torch.any(x > 0, dim=(0, 1)).float()), (series,)
    yield "bilinear", nn.Bilinear(16, 16, 4), (series, series + 1)
    yield "foreach", Calls(lambda x: torch._foreach_add([x, x], 1)), (series,)


def traced(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    found = torch.jit.trace(module, inputs, check_trace=False, strict=False)
    return found(*others)


def traced_without_gradients(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    with torch.no_grad():
        return traced(module, inputs, others)


def frozen(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    found = torch.jit.trace(module.eval(), inputs, check_trace=False, strict=False)
    return torch.jit.freeze(found)(*others)


def symbolic(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    return make_fx(lambda *given: module(*given))(*inputs)(*others)


def exported(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    return torch.export.export(module, inputs, strict=False).module()(*others)


def mapped(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    pairs = [torch.stack(pair) for pair in zip(inputs, others, strict=True)]
    return torch.vmap(module, randomness="same")(*pairs)


def counted(module: nn.Module, inputs: Tensors, others: Tensors) -> object:
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return torch.tensor(float(counter.get_total_flops()))


WAYS = (traced, traced_without_gradients, frozen, symbolic, exported, mapped, counted)


def tensors(found: object) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(found)
    return [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def main() -> None:
    warnings.simplefilter("ignore")
    agreed = 0
    for name, module, inputs in modules():
        others = tuple(x * 1.5 + 0.1 if x.is_floating_point() else x for x in inputs)
        for way in WAYS:
            try:
                wanted = tensors(way(copy.deepcopy(module), inputs, others))
            except RuntimeError:
                continue  # torch does not support it
            there = [tuple(x.cuda() for x in given) for given in (inputs, others)]
            try:
                found = tensors(way(copy.deepcopy(module).cuda(), *there))
            except RuntimeError as error:
                print(f"{name}, {way.__name__}: {error}".splitlines()[0])
                continue
            alike = len(found) == len(wanted) and all(
                torch.allclose(a, b, rtol=1e-4, atol=2e-5)
                for a, b in zip(found, wanted, strict=True)
            )
            agreed += alike
            if not alike:
                print(f"{name}, {way.__name__}: another result")
    print(agreed)


if __name__ == "__main__":
    main()
