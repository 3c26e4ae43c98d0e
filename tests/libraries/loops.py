"""Training loops as people write them with torch alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.libraries.programs import (
    ROUNDING,
    convolutions,
    network,
    noise,
    program,
    tokens,
    trained,
    weights,
)

# -------------------------------------------------------------------- recurrent


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, padding_idx=0)
        self.layers = kind(8, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        states, _ = self.layers(packed)
        return self.head(pad_packed_sequence(states, batch_first=True)[0])


@program(relative=ROUNDING)  # fused cells, where the CPU has separate operators
def a_bidirectional_lstm_of_packed_sequences(device: str) -> object:
    found = {}
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        model = Tagger(kind).to(device)
        sequences = [tokens(n, below=50, seed=n) for n in (7, 3, 9, 1)]
        lengths = torch.tensor([len(each) for each in sequences])
        words = pad_sequence(sequences, batch_first=True).to(device)
        labels = (words % 5).masked_fill(words == 0, -100)

        def loss(model: Any = model, words: Any = words, labels: Any = labels) -> torch.Tensor:
            logits = model(words, lengths)  # noqa: B023
            return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)

        found[kind.__name__] = trained(model, loss, steps=4)
    return found


@program(relative=ROUNDING)
def speech_with_ctc(device: str) -> object:
    torch.manual_seed(0)
    body, head = nn.LSTM(6, 8).to(device), nn.Linear(8, 10).to(device)
    sound, targets = noise(20, 3, 6).to(device), tokens(3, 5, below=10).to(device)
    lengths, counts = torch.tensor([20, 15, 12]), torch.tensor([5, 4, 2])

    def loss() -> torch.Tensor:
        return F.ctc_loss(head(body(sound)[0]).log_softmax(-1), targets, lengths, counts)

    return trained(nn.ModuleList([body, head]), loss, steps=4)


# -------------------------------------------------------------------- two models


@program
def two_players(device: str) -> object:
    torch.manual_seed(0)
    player = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1), nn.Tanh(),
    ).to(device)  # fmt: skip
    critic = nn.Sequential(
        nn.utils.spectral_norm(nn.Conv2d(3, 8, 4, stride=2, padding=1)), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(128, 1),
    ).to(device)  # fmt: skip
    of_player = optim.Adam(player.parameters(), 2e-3, betas=(0.5, 0.999))
    of_critic = optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.999))
    losses = []
    torch.manual_seed(1)
    for step in range(4):
        real = noise(6, 3, 8, 8, seed=step).to(device)
        fake = player(torch.randn(6, 4, 1, 1, device=device))
        of_critic.zero_grad()
        ones, zeros = torch.ones(6, 1, device=device), torch.zeros(6, 1, device=device)
        one = F.binary_cross_entropy_with_logits(critic(real), ones)
        other = F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        (one + other).backward()
        of_critic.step()
        of_player.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(critic(fake), ones)
        fooled.backward()
        of_player.step()
        losses += [one.item(), other.item(), fooled.item()]
    return losses


@program
def a_penalty_on_gradients(device: str) -> object:
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, stride=2), nn.SiLU(),
        nn.Flatten(), nn.Linear(72, 1),
    ).to(device)  # fmt: skip
    real, fake = noise(4, 3, 8, 8).to(device), noise(4, 3, 8, 8, seed=8).to(device)

    def loss() -> torch.Tensor:
        share = torch.rand(4, 1, 1, 1, device=device)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        return critic(fake).mean() - critic(real).mean() + 10 * penalty

    return trained(critic, loss, steps=4)


@program
def a_teacher_and_its_average(device: str) -> object:
    student = convolutions(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    averaged = optim.swa_utils.AveragedModel(
        student, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    images = noise(8, 3, 16, 16).to(device)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(images).softmax(-1)
        return F.kl_div(student(images).log_softmax(-1), wanted, reduction="batchmean") + 0.1 * (
            student(images).square().mean()
        )

    def after() -> None:
        averaged.update_parameters(student)
        with torch.no_grad():
            for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
                one.lerp_(other, 0.05)

    losses = trained(student, loss, steps=4, after=after)
    return losses, weights(averaged), weights(teacher), list(averaged.module.buffers())


# -------------------------------------------------------------------- precision, accumulation


def mixed(
    device: str, kind: torch.dtype, scaler: torch.amp.GradScaler | None, layers: Any = nn.Identity
) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
        layers(24), nn.Linear(24, 16), nn.Sigmoid(), nn.Linear(16, 3),
    ).to(device)  # fmt: skip
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    inputs, wanted = noise(24, 8).to(device), noise(24, 3, seed=9).to(device)
    torch.manual_seed(1)
    losses = []
    for step in range(6):
        part = slice(4 * step, 4 * step + 4)
        with torch.autocast(device, dtype=kind):
            loss = F.mse_loss(model(inputs[part]), wanted[part]) / 2
        (scaler.scale(loss) if scaler else loss).backward()
        if step % 2:
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@program
def accumulating_in_bfloat16(device: str) -> object:
    return mixed(device, torch.bfloat16, None)


@program
def accumulating_in_float16_with_a_scaler(device: str) -> object:
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
    first = mixed(device, torch.float16, scaler)
    # Gradients overflow: the step is skipped, and the scale is halved.
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24)
    return first, mixed(device, torch.float16, scaler), scaler.get_scale()


# Autocast has other lists of operators for CUDA than for the CPU, layer norms among them. Thus
# precisions differ, as they would with a GPU.
@program(relative=0.01)
def accumulating_where_autocast_differs(device: str) -> object:
    return mixed(device, torch.bfloat16, None, nn.LayerNorm)


@program
def accumulating_in_float64(device: str) -> object:
    model = network(device).double()
    batches = [noise(5, 8, seed=seed).double().to(device) for seed in range(4)]

    def loss() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in batches:
            part = model(batch).square().mean() / 4
            part.backward(retain_graph=True)
            total = total + part.detach()
        return total.requires_grad_()

    return trained(model, loss), weights(model)


# -------------------------------------------------------------------- autograd by hand


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return outer * (x.abs() < 2), None


@program
def a_function_of_ones_own(device: str) -> object:
    model = network(device)
    inputs, labels = noise(8, 8).to(device), (tokens(8, below=8) - 5).to(device)
    return trained(model, lambda: F.cross_entropy(Rounded.apply(model(inputs), 4), labels), steps=4)


@program
def hooks_watch_and_change(device: str) -> object:
    model = convolutions(device)
    images, labels = noise(4, 3, 16, 16).to(device), (tokens(4, below=9) - 5).to(device)
    seen: list[tuple[str, float]] = []
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda _, __, out, name=name: seen.append((name, out.detach().float().norm().item()))
        )
        module.register_full_backward_hook(
            lambda _, __, outer, name=name: seen.append((name, outer[0].norm().item()))
        )
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    for parameter in model.parameters():
        parameter.register_hook(lambda slope: slope.clamp(-0.1, 0.1))
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(("", p.grad.sum().item()))
        )
    losses = trained(model, lambda: F.cross_entropy(model(images), labels), steps=2)
    return losses, seen


@program
def gradients_of_each_sample(device: str) -> object:
    model = network(device)
    inputs, labels = noise(6, 8).to(device), (tokens(6, below=8) - 5).to(device)
    named = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, one: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, values, (one[None],)), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(named, inputs, labels)
    curved = hessian(lambda x: model(x).square().sum())(inputs[0])
    return each, curved, jacrev(model)(inputs[0])


@program
def derivatives_in_directions(device: str) -> object:
    model, layer = network(device), convolutions(device)[0]
    inputs, images = noise(5, 8).to(device), noise(3, 3, 6, 6).to(device)
    named = {name: p.detach() for name, p in layer.named_parameters()}
    found, pull = vjp(model, inputs)
    pushed = jvp(model, (inputs,), (torch.ones_like(inputs),))
    _, push = linearize(model, inputs)
    each = vmap(jacfwd(model))(inputs)
    curved = vmap(hessian(lambda x: model(x).sum()), chunk_size=2)(inputs)

    def loss(values: Any, image: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, values, (image[None],)).square().sum()

    filters = vmap(grad(loss), in_dims=(None, 0))(named, images)
    torch.manual_seed(2)
    drawn = vmap(lambda x: F.dropout(x), randomness="different")(inputs)
    return pull(found), pushed, push(inputs), each, curved, filters, drawn


@program
def an_ensemble(device: str) -> object:
    models = [network(device) for _ in range(3)]
    for index, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + index / 10)
    values, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    inputs = noise(5, 8).to(device)
    call = lambda v, b, x: functional_call(base, (v, b), (x,))  # noqa: E731
    return vmap(call, in_dims=(0, 0, None))(values, buffers, inputs)


@program
def learning_to_learn(device: str) -> object:
    model = network(device, 1, 1)
    named = dict(model.named_parameters())

    def loss() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for task in range(3):
            x, y = noise(5, 1, seed=task).to(device), noise(5, 1, seed=task + 9).to(device)
            inner = F.mse_loss(functional_call(model, named, (x,)), y)
            slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            pairs = zip(named.items(), slopes, strict=True)
            fast = {name: value - 0.1 * slope for (name, value), slope in pairs}
            total = total + F.mse_loss(functional_call(model, fast, (x,)), y)
        return total

    return trained(model, loss, steps=4)
