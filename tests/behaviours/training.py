"""Optimizers, schedules, and operations on modules around a training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils import parametrizations, parametrize, prune

from tests.behaviours.comparison import behaviour, normal, passes, refusal, whole


class Loop:
    """A small model, its optimizer, and steps of training it."""

    def __init__(self, device: str, make: Callable[[Any], optim.Optimizer]) -> None:
        self.model = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
        self.optimizer = make(self.model.parameters())
        self.x, self.y = normal(device, 20, 7), normal(device, 20, 3)

    def step(self) -> float:
        return self.optimizer.step(self.loss).item()

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        return loss


def trained(device: str, make: Callable[[Any], optim.Optimizer]) -> object:
    loop = Loop(device, make)
    return [loop.step() for _ in range(4)], list(loop.model.parameters())


@behaviour
def optimizers_of_few_rules(device: str) -> object:
    return {
        "SGD": trained(device, lambda p: optim.SGD(p, 0.1)),
        "momentum": trained(device, lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True)),
        "Adagrad": trained(device, lambda p: optim.Adagrad(p, 0.01)),
        "Adadelta": trained(device, lambda p: optim.Adadelta(p, 0.5)),
        "RMSprop": trained(device, lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.5)),
        "Rprop": trained(device, lambda p: optim.Rprop(p, 0.01)),
        "LBFGS": trained(device, lambda p: optim.LBFGS(p, 0.1, line_search_fn="strong_wolfe")),
    }


@behaviour
def optimizers_with_moments(device: str) -> object:
    return {
        "Adam": trained(device, lambda p: optim.Adam(p, 0.01, amsgrad=True)),
        "AdamW": trained(device, lambda p: optim.AdamW(p, 0.01, weight_decay=0.1)),
        "Adamax": trained(device, lambda p: optim.Adamax(p, 0.01)),
        "Adafactor": trained(device, lambda p: optim.Adafactor(p, 0.01)),
    }


# On CUDA their defaults are the forms over lists of tensors, which multiply in another order; the
# same is so of averages of weights.
@behaviour(relative=1e-6)
def optimizers_with_other_orders(device: str) -> object:
    return {
        "NAdam": trained(device, lambda p: optim.NAdam(p, 0.01)),
        "RAdam": trained(device, lambda p: optim.RAdam(p, 0.01)),
        "ASGD": trained(device, lambda p: optim.ASGD(p, 0.1)),
    }


@behaviour
def optimizers_of_matrices(device: str) -> object:
    weight = nn.Parameter(normal(device, 6, 4))
    optimizer = optim.Muon([weight], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    return weight


@behaviour
def optimizers_by_implementation(device: str) -> object:
    return {
        f"{kind.__name__} {way}": trained(device, lambda p, k=kind, w=way: k(p, 0.01, **{w: True}))
        for kind in (optim.SGD, optim.Adam, optim.AdamW)
        for way in ("foreach", "fused")
    }


@behaviour
def a_rate_that_is_a_tensor(device: str) -> object:
    weight = nn.Parameter(normal(device, 3))
    optimizer = optim.Adam([weight], lr=torch.tensor(0.1), foreach=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight


@behaviour
def optimizers_saved_and_resumed(device: str) -> object:
    model = nn.Linear(7, 3).to(device)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    x = normal(device, 5, 7)

    def step(model: nn.Module, optimizer: optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = optim.AdamW(twin.parameters(), 0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pairs = [(step(model, optimizer), step(twin, resumed)) for _ in range(3)]
    return pairs, all(torch.equal(one, other) for one, other in pairs)


@behaviour
def groups_of_parameters(device: str) -> object:
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3)).to(device)
    optimizer = optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], 0.01
    )
    model[0].bias.requires_grad_(False)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(normal(device, 5, 7)).square().sum().backward()
        optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(normal(device, 2))]})
    return list(model.parameters()), [group["lr"] for group in optimizer.param_groups]


@behaviour
def schedules_of_the_rate(device: str) -> object:
    schedulers = optim.lr_scheduler
    kinds: dict[str, Callable[[optim.Optimizer], Any]] = {
        "step": lambda o: schedulers.StepLR(o, 2),
        "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
        "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
        "one cycle": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=6),
        "linear": lambda o: schedulers.LinearLR(o),
        "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
        "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
        "sequence": lambda o: schedulers.SequentialLR(
            o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.PolynomialLR(o, 3)], [2]
        ),
        "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2),
    }
    found = {}
    for name, make in kinds.items():
        loop = Loop(device, lambda p: optim.SGD(p, 0.1, 0.9))
        schedule, rates = make(loop.optimizer), []
        for _ in range(4):
            rates.append((loop.step(), schedule.get_last_lr()))
            schedule.step()
        found[name] = (rates, list(loop.model.parameters()))
    return found


@behaviour
def rates_that_follow_the_loss(device: str) -> object:
    weight = nn.Parameter(normal(device, 3))
    optimizer = optim.SGD([weight], 0.1)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    rates = []
    for loss in (1.0, 2.0, 3.0, 4.0):
        plateau.step(torch.tensor(loss, device=device))
        rates.append(plateau.get_last_lr())
    return rates


@behaviour(relative=1e-6)
def averages_of_weights(device: str) -> object:
    swa = optim.swa_utils
    loop = Loop(device, lambda p: optim.SGD(p, 0.1))
    mean = swa.AveragedModel(loop.model)
    moving = swa.AveragedModel(loop.model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    schedule = swa.SWALR(loop.optimizer, 0.05)
    for _ in range(4):
        loop.step()
        mean.update_parameters(loop.model)
        moving.update_parameters(loop.model)
        schedule.step()
    return mean.module.state_dict(), moving.module.state_dict()


@behaviour
def statistics_updated_after_averaging(device: str) -> object:
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)).to(device)
    average = optim.swa_utils.AveragedModel(model)
    data = [normal(device, 6, 7) for _ in range(3)]
    optim.swa_utils.update_bn(data, average)
    return average.module.state_dict()


@behaviour
def gradients_clipped(device: str) -> object:
    found = {}
    utils = nn.utils
    for name, clip in {
        "norm": lambda p: utils.clip_grad_norm_(p, 0.1),
        "largest": lambda p: utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
        "one by one": lambda p: utils.clip_grad_norm_(p, 0.1, foreach=False),
        "value": lambda p: utils.clip_grad_value_(p, 0.01),
        "in two steps": lambda p: utils.clip_grads_with_norm_(p, 0.1, torch.tensor(3.0)),
        "measured": lambda p: utils.get_total_norm([each.grad for each in p]),
    }.items():
        model = nn.Linear(7, 3).to(device)
        model(normal(device, 5, 7)).square().sum().backward()
        parameters = list(model.parameters())
        found[name] = (clip(parameters), [p.grad for p in parameters])
    return found


@behaviour
def gradients_accumulated(device: str) -> object:
    model = nn.Linear(7, 3).to(device)
    whole_grads, parts = [], [normal(device, 5, 7) for _ in range(4)]
    for part in parts:
        (model(part).square().mean() / 4).backward()
    whole_grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return whole_grads, [p.grad for p in model.parameters()]


@behaviour
def weights_parametrized(device: str) -> object:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    layer = nn.Linear(7, 7)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    x = normal(device, 5, 7)
    found = passes(layer, x, device=device)
    parametrize.remove_parametrizations(layer, "weight")
    return (
        [found, layer.weight],
        passes(parametrizations.weight_norm(nn.Linear(7, 3)), x, device=device),
        passes(parametrizations.weight_norm(nn.Conv1d(5, 3, 2), dim=1), x[None], device=device),
        passes(parametrizations.spectral_norm(nn.Linear(7, 3)), x, device=device),
        passes(parametrizations.orthogonal(nn.Linear(7, 7)), x, device=device),
    )


@behaviour
def weights_pruned(device: str) -> object:
    layer = nn.Linear(7, 3).to(device)
    prune.l1_unstructured(layer, "weight", 0.4)
    prune.ln_structured(layer, "weight", 0.3, n=2, dim=0)
    found = layer(normal(device, 5, 7)), layer.weight_mask, layer.weight
    prune.remove(layer, "weight")
    prune.global_unstructured([(layer, "weight"), (layer, "bias")], prune.L1Unstructured, amount=5)
    return found, layer.weight, layer.bias


@behaviour
def weights_as_one_vector(device: str) -> object:
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3)).to(device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters())


@behaviour
def weights_initialised(device: str) -> object:
    init = nn.init
    weight = torch.empty(6, 4, device=device)
    return {
        name: function(weight.clone())
        for name, function in {
            "constant": lambda w: init.constant_(w, 3),
            "eye": init.eye_,
            "xavier": init.xavier_uniform_,
            "kaiming": lambda w: init.kaiming_normal_(w, nonlinearity="relu"),
            "truncated": lambda w: init.trunc_normal_(w, std=0.02),
            "orthogonal": init.orthogonal_,
            "uniform": lambda w: init.uniform_(w, -1, 1),
        }.items()
    }


@behaviour
def modules_converted(device: str) -> object:
    x = normal(device, 2, 3, 5, 5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(device).eval()
    found = {}
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        found[str(dtype)] = (model.to(dtype)(x.to(dtype)), model.state_dict())
    model = model.to(memory_format=torch.channels_last)
    found["last"] = (model(x.to(memory_format=torch.channels_last)), model.state_dict())
    back = model.cpu()
    found["back"] = back(x.cpu()).tolist()
    empty = nn.Linear(3, 2, device="meta").to_empty(device=device)
    empty.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    found["from meta"] = empty(torch.ones(1, 3, device=device))
    return found, [p.dtype for p in model.half().parameters()]


@behaviour
def modules_copied_and_loaded(device: str) -> object:
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)).to(device)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    other = nn.Sequential(nn.Linear(7, 4, device=device), nn.BatchNorm1d(4, device=device))
    result = other.load_state_dict(twin.state_dict())
    assigned = nn.Linear(7, 4, device="meta")
    assigned.load_state_dict(twin[0].state_dict(), assign=True)
    tied = nn.Linear(4, 4)
    tied.again = tied.weight
    tied.to(device)
    return (
        [twin.state_dict(), other.state_dict(), assigned.state_dict(), str(result)],
        [tied.weight is tied.again, refusal(lambda: other.load_state_dict({}))],
    )


@behaviour
def modules_called_with_other_weights(device: str) -> object:
    model = nn.Linear(7, 3).to(device)
    others = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    x = normal(device, 5, 7)
    call = torch.func.functional_call
    return call(model, others, x), call(model, {"bias": others["bias"]}, x)


@behaviour
def mixed_precision(device: str) -> object:
    model = nn.Sequential(nn.Linear(7, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    x, labels = normal(device, 5, 7), whole(device, 5, below=3)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        plain = model(x)
    return logits.dtype, loss.dtype, plain.dtype, [p.grad.dtype for p in model.parameters()], plain


@behaviour
def scaled_gradients(device: str) -> object:
    weight = nn.Parameter(normal(device, 4, 4))
    optimizer, scaler = optim.SGD([weight], 0.1), torch.amp.GradScaler(device, init_scale=1024.0)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weight


@behaviour
def a_loop_with_everything(device: str) -> object:
    data = torch.utils.data.TensorDataset(torch.randn(60, 1, 8, 8), torch.randint(4, (60,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 4),
    ).to(device)
    optimizer = optim.AdamW(model.parameters(), 0.01)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    losses, right = [], 0
    for _ in range(2):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        with torch.inference_mode():
            for x, y in loader:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    return losses, right, model.state_dict()
