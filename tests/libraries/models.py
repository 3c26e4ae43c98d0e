"""Models of many kinds, with torch alone, and common operations on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.libraries.programs import (
    ROUNDING,
    convolutions,
    network,
    noise,
    program,
    tokens,
    trained,
)


@program
def a_variational_autoencoder(device: str) -> object:
    encoder, decoder = network(device, 12, 8), network(device, 4, 12)
    inputs = noise(10, 12).to(device)

    def loss() -> torch.Tensor:
        mean, scale = encoder(inputs).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        latent = posterior.rsample()
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
        return ((decoder(latent) - inputs).square().sum(-1) + kl).mean()

    return trained(nn.ModuleList([encoder, decoder]), loss, steps=4)


@program
def a_policy(device: str) -> object:
    policy = network(device, 4, 3)
    states = noise(16, 4).to(device)
    chosen = []

    def loss() -> torch.Tensor:
        choice = torch.distributions.Categorical(logits=policy(states))
        actions = choice.sample()
        chosen.append(actions)
        rewards = (actions == states.argmax(-1).clamp(max=2)).float()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return -(choice.log_prob(actions) * advantages).mean() - 0.01 * choice.entropy().mean()

    return trained(policy, loss, steps=5), torch.stack(chosen)


@program
def a_network_of_frequencies(device: str) -> object:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64).to(device))
    head = nn.Linear(8, 2).to(device)
    sound = noise(6, 4, 8).to(device)

    def loss() -> torch.Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(sound) * filters, n=8)
        return head(filtered).square().mean() + filters.abs().sum() * 1e-2

    model = nn.Module()
    model.filters, model.head = filters, head
    return trained(model, loss, steps=4), filters


@program
def a_network_of_graphs(device: str) -> object:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8).to(device), nn.Linear(8, 3).to(device)
    nodes, labels = noise(12, 6).to(device), (tokens(12, below=8) - 5).to(device)
    source, target = (tokens(30, below=17, seed=seed).to(device) - 5 for seed in (1, 2))

    def spread(values: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(values).index_add_(0, target, values[source])
        degree = torch.zeros(12, device=device).scatter_add_(
            0, target, torch.ones(30, device=device)
        )
        return total / degree.clamp(min=1)[:, None]

    def loss() -> torch.Tensor:
        hidden = F.relu(first(spread(nodes)))
        return F.nll_loss(second(spread(hidden)).log_softmax(-1), labels)

    return trained(nn.ModuleList([first, second]), loss, steps=4)


@program(relative=ROUNDING)  # in evaluation mode: the CPU has a fused layer
def a_transformer_with_masks(device: str) -> object:
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 1, 1, 32, dropout=0.1, batch_first=True).to(device)
    source, target = noise(3, 7, 16).to(device), noise(3, 5, 16).to(device)
    hidden = (torch.arange(7) >= torch.tensor([[7], [5], [2]])).to(device)
    causal = nn.Transformer.generate_square_subsequent_mask(5, device=device).isinf()

    def run() -> torch.Tensor:
        return model(
            source, target, tgt_mask=causal, src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )  # fmt: skip

    losses = trained(model, lambda: run().square().mean() + run().mean(), steps=3)
    model.eval()
    with torch.no_grad():
        return losses, run()


@program
def weights_reshaped_and_pruned(device: str) -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)).to(device)
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[1])
    prune.l1_unstructured(model[2], "weight", 0.3)
    inputs = noise(6, 8).to(device)
    losses = trained(model, lambda: model(inputs).square().mean(), steps=4)
    prune.remove(model[2], "weight")
    return losses, model[0].weight, model[2].weight


def collate(rows: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    sequences, labels = zip(*rows, strict=True)
    return {"words": pad_sequence(sequences, batch_first=True), "labels": torch.tensor(labels)}


@program
def bags_of_words_from_a_loader(device: str) -> object:
    torch.manual_seed(0)
    words, head = nn.EmbeddingBag(50, 8, mode="mean", padding_idx=0).to(device), nn.Linear(8, 3)
    model = nn.Sequential(words, head.to(device))
    rows = [(tokens(1 + index % 5, below=50, seed=index), index % 3) for index in range(20)]
    losses = []
    optimizer = optim.SGD(model.parameters(), 0.5, momentum=0.9, nesterov=True)
    for workers in (0, 2):
        loader = DataLoader(
            rows, batch_size=4, collate_fn=collate, num_workers=workers,
            pin_memory=device == "cuda",
        )  # fmt: skip
        for batch in loader:
            moved = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            loss = F.cross_entropy(model(moved["words"]), moved["labels"])
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@program
def styles_by_other_optimizers(device: str) -> object:
    image = noise(1, 3, 12, 12).to(device).requires_grad_()
    features = convolutions(device).eval()[:4].requires_grad_(False)
    wanted = features(noise(1, 3, 12, 12, seed=9).to(device))
    optimizer = optim.LBFGS([image], 0.5, max_iter=4, line_search_fn="strong_wolfe")
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(features(image), wanted)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return losses, image


@program
def volumes_resampled(device: str) -> object:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool3d(2),
        nn.ConvTranspose3d(4, 2, 2, stride=2), nn.Upsample(scale_factor=2, mode="trilinear"),
    ).to(device)  # fmt: skip
    volume = noise(2, 1, 4, 6, 6).to(device)
    turn = nn.Parameter(torch.eye(3, 4, device=device).repeat(2, 1, 1) + 0.05)

    def loss() -> torch.Tensor:
        grid = F.affine_grid(turn, [2, 2, 8, 12, 12], align_corners=False)
        return F.grid_sample(model(volume), grid, align_corners=False).square().mean()

    model.turn = nn.ParameterList([turn])
    model.forward = nn.Sequential.forward.__get__(nn.Sequential(*list(model)[:6]))
    return trained(model, loss, steps=3), turn


@program
def memory_saved_in_other_ways(device: str) -> object:
    model = convolutions(device).to(memory_format=torch.channels_last)
    images = noise(4, 3, 16, 16).to(device).to(memory_format=torch.channels_last)

    def loss() -> torch.Tensor:
        # Copies into pinned memory lose the memory format of the channels, on both sides.
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(images).square().mean()

    first = trained(model, loss)
    with torch.autograd.detect_anomaly(check_nan=True):
        return first, trained(model, lambda: model(images).square().mean())
