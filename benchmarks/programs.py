"""Training programs as users write them: the device's name is all that they know of it.

A program is made by a function of (device, small), which returns its step: a function that trains
on one batch and returns the loss, a tensor on the device. Models and data are made on the CPU with
a fixed seed, and the generators are seeded last, so all devices compute the same.
Text models also return what they generate.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], torch.Tensor]
Program = Callable[[str, bool], Step]

BATCHES = 8
VOCABULARY = 256


def training(
    model: nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    device: str,
) -> Step:
    """Make the step of an ordinary training loop; batches come from host memory."""
    taken = 0

    def step() -> torch.Tensor:
        nonlocal taken
        inputs, targets = (tensor.to(device) for tensor in batches[taken % len(batches)])
        taken += 1
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model.train()
    torch.manual_seed(1)
    return step


def classify(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the model's output."""
    return F.cross_entropy(model(inputs), targets)


def images(count: int, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make batches of random images, each with one of ten labels."""
    return [(torch.randn(count, *shape), torch.randint(10, (count,))) for _ in range(BATCHES)]


def texts(count: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make batches of random tokens, and of the tokens that follow them."""
    sequences = [torch.randint(VOCABULARY, (count, length + 1)) for _ in range(BATCHES)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in sequences]


def mlp(device: str, small: bool) -> Step:
    """Four linear layers, SGD with momentum."""
    torch.manual_seed(0)
    width = 64 if small else 512
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return training(model, images(16 if small else 128, width), classify, optimizer, device)


def large(device: str, small: bool) -> Step:
    """Wide layers with Adam: 1 GiB of weights, gradients and moments that change at each step."""
    torch.manual_seed(0)
    width = 256 if small else 4096
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batches = [(torch.randn(32, width), torch.randint(width, (32,))) for _ in range(2)]
    return training(model, batches, classify, optimizer, device)


def frozen(device: str, small: bool) -> Step:
    """A small head that is trained on 1 GiB of frozen layers."""
    torch.manual_seed(0)
    width = 256 if small else 4096
    body = [nn.Linear(width, width, bias=False) for _ in range(16)]
    model = nn.Sequential(*body, nn.Linear(width, 10)).to(device)
    for layer in body:
        layer.weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model[-1].parameters(), lr=1e-4)
    batches = [(torch.randn(32, width), torch.randint(10, (32,))) for _ in range(2)]
    return training(model, batches, classify, optimizer, device)


def experts(device: str, small: bool) -> Step:
    """64 experts of 16 MiB, one after the other: short steps, and soon all state has changed."""
    torch.manual_seed(0)
    width, count = (64, 4) if small else (2048, 64)
    layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(count)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in layers]
    inputs = torch.randn(64, width).to(device)
    turns = itertools.cycle(range(count))

    def step() -> torch.Tensor:
        turn = next(turns)
        loss: torch.Tensor = (layers[turn](inputs) - inputs).square().mean()
        loss.backward()
        optimizers[turn].step()
        optimizers[turn].zero_grad()
        return loss.detach()

    return step


def routed(device: str, small: bool) -> Step:
    """A mixture of experts: which rows an expert gets, and how many, depends on the data."""
    torch.manual_seed(0)
    width, count = (16, 4) if small else (256, 8)
    router = nn.Linear(width, count).to(device)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count)).to(device)
    optimizer = torch.optim.SGD([*router.parameters(), *layers.parameters()], lr=0.05)
    batches = itertools.cycle([torch.randn(64, width) for _ in range(BATCHES)])

    def step() -> torch.Tensor:
        inputs = next(batches).to(device)
        weights = router(inputs).softmax(-1)
        chosen, outputs = weights.argmax(-1), torch.zeros_like(inputs)
        for index, layer in enumerate(layers):
            rows = (chosen == index).nonzero().flatten()
            outputs = outputs.index_add(0, rows, layer(inputs[rows]) * weights[rows, index, None])
        loss = (outputs - inputs.sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def cnn(device: str, small: bool) -> Step:
    """Convolutions with batch norm and pooling, AdamW."""
    torch.manual_seed(0)
    width, side = (8, 16) if small else (32, 32)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = images(8 if small else 64, 3, side, side)
    return training(model, batches, classify, optimizer, device)


class Encoder(nn.Module):
    """A language model of encoder layers with dropout."""

    def __init__(self, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions
        return self.head(self.layers(hidden)).transpose(1, 2)


def transformer(device: str, small: bool) -> Step:
    """A transformer encoder with dropout, Adam."""
    torch.manual_seed(0)
    width, length, count = (32, 16, 4) if small else (128, 64, 16)
    model = Encoder(width, 4, 2, length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return training(model, texts(count, length), classify, optimizer, device)


class _Recurrent(nn.Module):
    """A language model of a two-layer recurrent network."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.tokens(tokens))
        return self.head(hidden).transpose(1, 2)


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU], device: str, small: bool) -> Step:
    torch.manual_seed(0)
    width, length, count = (32, 12, 4) if small else (128, 32, 32)
    model = _Recurrent(kind, width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return training(model, texts(count, length), classify, optimizer, device)


def lstm(device: str, small: bool) -> Step:
    """A two-layer LSTM, Adam."""
    return _recurrent(nn.LSTM, device, small)


def gru(device: str, small: bool) -> Step:
    """A two-layer GRU, Adam."""
    return _recurrent(nn.GRU, device, small)


# ---------------------------------------------------------------- transformers


def _gpt2(small: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers = (32, 2) if small else (128, 4)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=4, n_positions=128,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _llama(small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = (32, 2) if small else (128, 4)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _bert(small: bool) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    width, layers = (32, 2) if small else (128, 4)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=4, max_position_embeddings=128,
        )
    )  # fmt: skip


_MODELS: dict[str, Callable[[bool], Any]] = {"gpt2": _gpt2, "llama": _llama, "bert": _bert}


def _labelled(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model(input_ids=inputs, labels=targets).loss


def language_model(kind: str, device: str, small: bool) -> tuple[Any, Step]:
    """Make one of transformers' models and the step that trains it.

    BERT learns to restore tokens; the others predict the next one, shifting labels themselves.
    """
    torch.manual_seed(0)
    model = _MODELS[kind](small).to(device)
    length, count = (16, 4) if small else (64, 8)
    batches = [(tokens, tokens) for tokens, _ in texts(count, length)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, training(model, batches, _labelled, optimizer, device)


def gpt2(device: str, small: bool) -> Step:
    """GPT-2 of transformers with random weights and dropout, AdamW."""
    return language_model("gpt2", device, small)[1]


def llama(device: str, small: bool) -> Step:
    """Llama of transformers with random weights, AdamW."""
    return language_model("llama", device, small)[1]


def bert(device: str, small: bool) -> Step:
    """BERT of transformers with random weights and dropout, AdamW."""
    return language_model("bert", device, small)[1]


def generate(model: Any, device: str, count: int, *, sample: bool) -> torch.Tensor:
    """Continue a fixed prompt by `count` tokens, greedily or by sampling."""
    prompt = torch.arange(1, 9).reshape(1, 8).to(device)
    choice = {"do_sample": True, "top_k": 20} if sample else {"do_sample": False}
    model.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0, **choice,
        )  # fmt: skip
    return tokens


def gpt2_generate(device: str, small: bool) -> Step:
    """Generation by GPT-2 of transformers; a step generates 32 tokens."""
    model, _ = language_model("gpt2", device, small)
    return lambda: generate(model, device, 8 if small else 32, sample=False)[0, -1]


TRAINING: dict[str, Program] = {
    "mlp": mlp, "cnn": cnn, "transformer": transformer, "lstm": lstm, "gru": gru,
}  # fmt: skip
TRANSFORMERS: dict[str, Program] = {"gpt2": gpt2, "llama": llama, "bert": bert}
