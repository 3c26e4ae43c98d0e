"""Nested tensors, in the strided and in the jagged layout."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.behaviours.comparison import behaviour, normal, refusal

LENGTHS = (3, 5, 2)


def parts(result: Any) -> Any:
    """Take nested tensors apart, in a nest of lists."""
    if isinstance(result, (list, tuple)):
        return [parts(each) for each in result]
    if isinstance(result, torch.Tensor) and result.is_nested:
        return [str(result.layout), result.dim(), list(result.unbind())]
    return result


def items(device: str) -> list[torch.Tensor]:
    return [normal(device, length, 4) for length in LENGTHS]


def strided(device: str) -> torch.Tensor:
    return torch.nested.nested_tensor(items(device), device=device)


def jagged(device: str) -> torch.Tensor:
    return torch.nested.nested_tensor(items(device), device=device, layout=torch.jagged)


@behaviour
def nested_tensors_are_made(device: str) -> object:
    padded, mask = normal(device, 2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    made = [
        strided(device),
        torch.nested.as_nested_tensor(items(device)),
        torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=device),
        torch.nested.nested_tensor(items("cpu"), device=device),
        torch._nested_from_padded(padded, torch.tensor([[2, 4], [3, 3]]), False),
        torch._nested_tensor_from_mask(padded, mask.to(device)),
        jagged(device),
        torch.nested.as_nested_tensor(items(device), layout=torch.jagged),
        torch.nested.nested_tensor_from_jagged(
            normal(device, 6, 3), torch.tensor([0, 2, 6]).to(device)
        ),
    ]
    aligned = torch._nested_tensor_from_mask_left_aligned(padded, mask.to(device))
    return parts([made, aligned, [torch.empty_like(each).dim() for each in made]])


@behaviour
def nested_tensors_move_between_host_and_device(device: str) -> object:
    results = []
    for make in (strided, jagged):
        there, back = make("cpu").to(device), make(device).cpu()
        assert there.device.type == device
        assert back.device.type == "cpu"
        results += [there, there.double(), [each.tolist() for each in back.unbind()]]
    return parts(results)


@behaviour
def nested_arithmetic(device: str) -> object:
    results = []
    for make in (strided, jagged):
        x = make(device)
        results += [x + x, x * x, x - x, x * 2, x + 1, x / 2, -x, x.relu(), x.tanh(), x.abs()]
        results += [functional.gelu(x), functional.silu(x), x.clone(), x.unsqueeze(2)]
    x = strided(device)
    x.mul_(2).add_(x)
    x.relu_()
    return parts([results, x, torch.cat([x, x]), x.chunk(2, -1), x[1], x.size(0), x.numel()])


@behaviour
def nested_padding(device: str) -> object:
    x, y = strided(device), jagged(device)
    return [torch.nested.to_padded_tensor(each, 0.5) for each in (x, y, x.relu(), y * 2)]


@behaviour
def nested_layers(device: str) -> object:
    weight, bias = normal(device, 3, 4), normal(device, 3)
    scale, shift = normal(device, 4), normal(device, 4)
    results = []
    for make in (strided, jagged):
        x = make(device)
        results += [functional.linear(x, weight, bias), functional.softmax(x, -1)]
        results += [functional.layer_norm(x, (4,), scale, shift)]
        results.append(functional.dropout(x, 0.5, training=False))
    x = strided(device)
    results += [x @ x.transpose(1, 2), torch.bmm(x, x.transpose(1, 2))]
    indices = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([0])], device=device)
    return parts([results, functional.embedding(indices, weight)])


# With weights, torch multiplies each sequence on CUDA, and all of them padded on the CPU.
@behaviour(relative=1e-6)
def nested_attention(device: str) -> object:
    results = []
    for layout in (torch.strided, torch.jagged):
        sequences = [normal(device, length, 2, 4) for length in LENGTHS]
        x = torch.nested.nested_tensor(sequences, device=device, layout=layout).transpose(1, 2)
        x = x.contiguous() if layout == torch.strided else x
        results.append(functional.scaled_dot_product_attention(x, x, x).transpose(1, 2))
    return parts(results)


@behaviour
def derivatives_of_nested_tensors(device: str) -> object:
    results = []
    for layout in (torch.strided, torch.jagged):
        leaves = [each.requires_grad_() for each in items(device)]
        weight, scale = (normal(device, 3, n).requires_grad_() for n in (4, 1))
        x = torch.nested.as_nested_tensor(leaves, layout=layout)
        y = functional.gelu(functional.linear(x, weight))
        y = functional.layer_norm(y, (3,), scale[:, 0], scale[:, 0])
        torch.nested.to_padded_tensor(y, 0.0).square().sum().backward()
        results += [weight.grad, scale.grad, [leaf.grad for leaf in leaves]]
    x = strided(device).requires_grad_()
    y = functional.softmax(x @ x.transpose(1, 2), -1)
    torch.nested.to_padded_tensor(y, 0.0).square().sum().backward()
    return parts([results, x.grad])


@behaviour
def encoders_of_padded_sequences(device: str) -> object:
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = mask[2, 4:] = True
    x, results = normal(device, 3, 5, 8), []
    for nested in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        encoder.to(device).eval()
        with torch.no_grad():
            results.append(encoder(x, src_key_padding_mask=mask.to(device)))
        trained = encoder.train()(x, src_key_padding_mask=mask.to(device))
        trained.square().sum().backward()
        results += [trained, [each.grad for each in encoder.parameters()]]
    return results


@behaviour
def nested_tensors_are_saved_and_printed(device: str) -> object:
    results = []
    for make in (strided, jagged):
        file = io.BytesIO()
        torch.save(make(device), file)
        file.seek(0)
        results.append(torch.load(file, weights_only=False))
    return parts([results, str(strided(device)).count("tensor([["), str(jagged(device))[:21]])


@behaviour
def nested_tensors_that_cannot_be(device: str) -> object:
    x = strided(device)
    other = torch.nested.nested_tensor([normal(device, n, 4) for n in (3, 5)], device=device)
    return [
        refusal(lambda: x + other),
        refusal(lambda: x.cumsum(1)),
        refusal(lambda: functional.layer_norm(x, (3,), normal(device, 3), normal(device, 3))),
        refusal(lambda: torch.nested.nested_tensor([normal(device, 2), normal(device, 2, 3)])),
        torch.nested.to_padded_tensor(x * 2, 0.0),
    ]
