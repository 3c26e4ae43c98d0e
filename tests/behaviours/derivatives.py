"""Autograd: what is recorded, what is not, and derivatives of derivatives."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.behaviours.comparison import behaviour, gradients, normal, refusal


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


@behaviour
def functions_of_ones_own(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    y = Cube.apply(x)
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return (
        y,
        first,
        torch.autograd.grad(first.sum(), x),
        torch.autograd.gradcheck(
            Cube.apply, normal(device, 2, 2, dtype=torch.float64).requires_grad_()
        ),
    )


@behaviour
def graphs_that_are_kept(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    y = (x**2).sum()
    y.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    y.backward()
    middle = x * 2
    middle.retain_grad()
    (middle**2).sum().backward()
    return once, x.grad, middle.grad, refusal(y.backward), x.grad_fn is None


@behaviour
def recording_is_switched(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    with torch.no_grad():
        silent = x * 2
        with torch.enable_grad():
            heard = x * 2
    with torch.inference_mode():
        inferred = x * 2
        inferred[0] = 1
    with torch.set_grad_enabled(False):
        off = x.sum()
    detached = x.detach()
    return (
        [silent, heard, off, detached, inferred.clone(), inferred.is_inference()],
        [refusal(lambda: inferred * x), refusal(lambda: x.add_(1)), x.is_leaf, heard.is_leaf],
    )


@behaviour
def anomalies_are_found(device: str) -> object:
    x = torch.zeros(3, device=device, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning reports where forward was called
        fine = torch.autograd.grad((x + 1).log().sum(), x)
        text = ""
        try:
            (x.sqrt() * 0).sum().backward()
        except RuntimeError as error:
            text = str(error)
    return fine, text


@behaviour
def changes_in_place_are_noticed(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    y = x.sigmoid()
    y.mul_(2)
    z = x * 2
    z[0] = 0
    z[:, 1].exp_()
    version = z._version
    return refusal(y.sum().backward), gradients(z, x), version


@behaviour
def higher_derivatives(device: str) -> object:
    x = normal(device, 5).requires_grad_()
    (first,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    penalty = torch.autograd.grad((second**2).sum(), x)
    functional = torch.autograd.functional
    return (
        [first, second, penalty],
        functional.jacobian(lambda a: a**2, x),
        functional.hessian(lambda a: (a**3).sum(), x),
        functional.hvp(lambda a: (a**3).sum(), x, torch.ones_like(x)),
        functional.vjp(lambda a: a.exp(), x, torch.ones_like(x)),
    )


@behaviour
def gradient_penalty_of_a_network(device: str) -> object:
    net = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    x = normal(device, 5, 7).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    penalty.backward()
    return penalty, [p.grad for p in net.parameters()]


@behaviour
def function_transforms(device: str) -> object:
    x, func = normal(device, 5, 7), torch.func
    return (
        [torch.vmap(lambda a: a * 2)(x), torch.vmap(torch.dot)(x, x), func.jacrev(torch.sin)(x[0])],
        [func.grad(lambda a: (a**2).sum())(x), func.jacfwd(torch.sin)(x[0])],
        [func.hessian(lambda a: (a**3).sum())(x[0]), func.jvp(torch.sin, (x,), (x,))],
        func.vjp(torch.exp, x)[1](x),
        torch.vmap(func.grad(lambda a, b: (a * b).sum().sin()), in_dims=(0, None))(x, x[0]),
        torch.vmap(lambda a: a.sort().values, in_dims=1, out_dims=1)(x),
        func.grad_and_value(lambda a: a.norm())(x),
    )


@behaviour
def gradients_of_each_sample(device: str) -> object:
    net = nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    weights = {name: p.detach() for name, p in net.named_parameters()}
    x, y = normal(device, 5, 7), normal(device, 5, 2)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((torch.func.functional_call(net, weights, (x,)) - y) ** 2).mean()

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)


@behaviour
def ensembles_of_models(device: str) -> object:
    nets = [nn.Linear(7, 2).to(device) for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)
    x = normal(device, 5, 7)
    return torch.vmap(
        lambda p, b: torch.func.functional_call(nets[0], (p, b), (x,)), randomness="same"
    )(params, buffers)


@behaviour
def forward_mode(device: str) -> object:
    x, direction = normal(device, 5, 7), normal(device, 5, 7)
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        dual = forward.make_dual(x, direction)
        value, slope = forward.unpack_dual((dual.sin() * dual).sum(1))
    return value, slope


@behaviour
def hooks(device: str) -> object:
    seen: list[Any] = []
    net = nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    x = normal(device, 5, 7).requires_grad_()
    weight: Any = net[0].weight
    handles = [
        net[0].register_forward_hook(lambda module, inputs, result: seen.append(result.detach())),
        net[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
        net[2].register_full_backward_hook(lambda module, ins, outs: seen.extend([*ins, *outs])),
        x.register_hook(lambda grad: grad * 10),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    net(x).sum().backward()
    for handle in handles:
        handle.remove()
    net(x).sum().backward()
    return seen, x.grad, net[0].weight.grad


@behaviour
def saved_tensors_on_the_host(device: str) -> object:
    x = normal(device, 5, 7).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad


@behaviour
def checkpoints_of_activations(device: str) -> object:
    net = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7)).to(device)
    x = normal(device, 5, 7).requires_grad_()
    found = []
    for result in (
        checkpoint(net, x, use_reentrant=False),
        checkpoint(net, x, use_reentrant=True),
        checkpoint_sequential(net, 2, x, use_reentrant=False),
    ):
        x.grad = None
        net.zero_grad()
        result.square().sum().backward()
        found.append([x.grad, [p.grad for p in net.parameters()]])
    return found


@behaviour
def dropout_is_repeated_by_checkpoints(device: str) -> object:
    drop, x = nn.Dropout(0.5), normal(device, 50, 7).requires_grad_()
    # The mask of the second forward pass must be that of the first: where a result is 0, its
    # gradient is, too.
    y = checkpoint(lambda a: drop(a), x, use_reentrant=False)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return torch.equal(slope == 0, y == 0), 0 < int((slope == 0).sum()) < x.numel()
