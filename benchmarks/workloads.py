"""More typical programs for the figures of `make bench`: vision, mixed precision, inference.

The programs are made like those of `programs`. Their sizes are chosen such that a step takes
milliseconds, so that the cost of a proxy would be visible.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import programs
from benchmarks.programs import Program, Step


def tiny(device: str, small: bool) -> Step:
    """Sixteen layers of 32 units, batches of 16: hundreds of operators with very little work."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4 if small else 16):
        layers += [nn.Linear(32, 32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return programs.training(model, programs.images(16, 32), programs.classify, optimizer, device)


class _Block(nn.Module):
    """Two convolutions with batch norm, and a skip connection."""

    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(2))
        self.around = nn.Conv2d(width, wider, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(inner)) + self.around(x)).relu()


def _resnet(small: bool) -> nn.Module:
    width, blocks = (8, 2) if small else (16, 6)
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    for index in range(blocks):
        stride = 2 if index % 2 else 1
        layers.append(_Block(width, width * stride, stride))
        width *= stride
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def resnet(device: str, small: bool) -> Step:
    """Residual blocks with batch norm, SGD with momentum and weight decay."""
    torch.manual_seed(0)
    model = _resnet(small).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    batches = programs.images(4 if small else 16, 3, 16, 16)
    return programs.training(model, batches, programs.classify, optimizer, device)


def vit(device: str, small: bool) -> Step:
    """A vision transformer of transformers, AdamW."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    width, layers = (32, 2) if small else (96, 4)
    config = ViTConfig(  # type: ignore[call-arg]
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=2 * width, image_size=32, patch_size=4, num_labels=10,
    )  # fmt: skip
    model: Any = ViTForImageClassification(config).to(device)  # type: ignore[arg-type]

    def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(pixel_values=inputs).logits, targets)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = programs.images(2 if small else 8, 3, 32, 32)
    return programs.training(model, batches, loss_of, optimizer, device)


def gan(device: str, small: bool) -> Step:
    """A generator and a discriminator, each with an Adam optimizer."""
    torch.manual_seed(0)
    width = 16 if small else 128
    makes = nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2), nn.Linear(width, width),
        nn.BatchNorm1d(width), nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Tanh(),
    ).to(device)  # fmt: skip
    judges = nn.Sequential(
        nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(width, width),
        nn.LeakyReLU(0.2), nn.Linear(width, 1),
    ).to(device)  # fmt: skip
    optimizers = [torch.optim.Adam(net.parameters(), lr=2e-4) for net in (makes, judges)]
    batches = itertools.cycle(programs.images(64, 64))
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(1)

    def step() -> torch.Tensor:
        real = next(batches)[0].to(device)
        yes = torch.ones(len(real), 1, device=device)
        made = makes(torch.randn(len(real), 16, device=device))
        optimizers[1].zero_grad()
        loss = criterion(judges(real), yes) + criterion(judges(made.detach()), yes * 0)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled: torch.Tensor = criterion(judges(made), yes)
        fooled.backward()
        optimizers[0].step()
        return fooled.detach()

    return step


def mixed(device: str, small: bool) -> Step:
    """An encoder under autocast to bfloat16, gradients accumulated twice and clipped."""
    torch.manual_seed(0)
    width, length, count = (32, 16, 4) if small else (128, 32, 8)
    model = programs.Encoder(width, 4, 2, length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = itertools.cycle(programs.texts(count, length))
    torch.manual_seed(1)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            inputs, targets = (tensor.to(device) for tensor in next(batches))
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = programs.classify(model, inputs, targets) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


class _Recommender(nn.Module):
    """Sums of embeddings of clicked items, and a few dense layers on top."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(items, width, mode="sum") for _ in range(8))
        self.dense = nn.Sequential(
            nn.Linear(8 * width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, clicked: torch.Tensor) -> torch.Tensor:
        sums = [bag(part) for bag, part in zip(self.bags, clicked.unbind(1), strict=True)]
        return self.dense(torch.cat(sums, 1))


def recommender(device: str, small: bool) -> Step:
    """Embedding bags and dense layers, Adagrad."""
    torch.manual_seed(0)
    items = 100 if small else 5000
    model = _Recommender(items, 16).to(device)
    batches = [
        (torch.randint(items, (256, 8, 10)), torch.randint(10, (256,)))
        for _ in range(programs.BATCHES)
    ]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    return programs.training(model, batches, programs.classify, optimizer, device)


# ---------------------------------------------------------------- inference


def _answering(model: Any, inputs: torch.Tensor, device: str, ask: Callable[..., Any]) -> Step:
    """Make a step that runs a model without gradients."""
    model = model.to(device).eval()

    def step() -> torch.Tensor:
        with torch.inference_mode():
            answer: torch.Tensor = ask(model, inputs.to(device)).float().mean()
            return answer

    return step


def bert_answers(device: str, small: bool) -> Step:
    """BERT of transformers fills in tokens."""
    model, _ = programs.language_model("bert", "cpu", small)
    inputs = torch.randint(programs.VOCABULARY, (1 if small else 4, 16 if small else 64))
    return _answering(model, inputs, device, lambda model, x: model(input_ids=x).logits)


def resnet_answers(device: str, small: bool) -> Step:
    """The residual network classifies one image at a time."""
    torch.manual_seed(0)
    return _answering(_resnet(small), torch.randn(1, 3, 16, 16), device, lambda model, x: model(x))


def denoise(device: str, small: bool) -> Step:
    """A step of diffusers' UNet and its DDIM scheduler."""
    from diffusers import DDIMScheduler, UNet2DModel

    torch.manual_seed(0)
    width = 32 if small else 64
    model: Any = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
        block_out_channels=(width, width), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    schedule: Any = DDIMScheduler(num_train_timesteps=100)
    schedule.set_timesteps(10)

    def ask(model: Any, image: torch.Tensor) -> torch.Tensor:
        moment = schedule.timesteps[5]
        return schedule.step(model(image, moment).sample, moment, image).prev_sample

    return _answering(model, torch.randn(1, 3, 16, 16), device, ask)


def llama_generate(device: str, small: bool) -> Step:
    """Generation by Llama of transformers with a key-value cache; a step samples 32 tokens."""
    model, _ = programs.language_model("llama", device, small)
    return lambda: programs.generate(model, device, 8 if small else 32, sample=True)[0, -1]


#: Programs by the names that `make bench` shows.
PROGRAMS: dict[str, Program] = {
    **programs.TRAINING, **programs.TRANSFORMERS, "tiny": tiny, "resnet": resnet, "vit": vit,
    "gan": gan, "mixed precision": mixed, "recommender": recommender,
    "bert inference": bert_answers, "resnet inference": resnet_answers, "unet inference": denoise,
    "gpt2 generation": programs.gpt2_generate, "llama generation": llama_generate,
}  # fmt: skip
