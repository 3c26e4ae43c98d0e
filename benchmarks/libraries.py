"""Short programs of libraries, with many small operators and with requests that wait for answers.

The programs are made like those of `programs`; each step is what a user would call once.
"""

from __future__ import annotations

import io
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.programs import Program, Step


def prompt_lookup(device: str, small: bool) -> Step:
    """Generation with prompt lookup for the next tokens: each reads numbers from the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, tokens = (32, 8) if small else (128, 64)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().to(device)
    prompt = torch.randint(0, 256, (1, 32)).to(device)

    def step() -> torch.Tensor:
        found = model.generate(
            prompt, max_new_tokens=tokens, prompt_lookup_num_tokens=5, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answer: torch.Tensor = found.float().mean()
        return answer

    return step


def variational(device: str, small: bool) -> Step:
    """Ten steps of variational inference with pyro, which checks its arguments on the device."""
    import pyro
    from pyro import distributions, infer, optim

    torch.manual_seed(0)
    pyro.clear_param_store()
    inputs = torch.randn(200, 5)
    targets = (inputs @ torch.arange(1.0, 6.0)).to(device)
    inputs = inputs.to(device)

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        zeros = torch.zeros(5, device=x.device)
        weights = pyro.sample("weights", distributions.Normal(zeros, 1.0).to_event(1))
        scale = pyro.sample("scale", distributions.LogNormal(zeros[0], 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("observed", distributions.Normal(x @ weights, scale), obs=y)

    guide = infer.autoguide.AutoNormal(model)
    inference = infer.SVI(
        model,
        guide,
        optim.Adam({"lr": 0.01}),  # type: ignore[attr-defined]
        infer.Trace_ELBO(),
    )

    def step() -> torch.Tensor:
        return torch.tensor([inference.step(inputs, targets) for _ in range(10)]).mean()

    return step


def graph(device: str, small: bool) -> Step:
    """A step of a graph network of torch_geometric: thirty-odd small operators."""
    from torch_geometric.nn import GCNConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(16, 32), GCNConv(32, 4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.second(F.relu(self.first(x, edges)), edges)
            return found

    torch.manual_seed(0)
    nodes = 50 if small else 500
    x, edges = torch.randn(nodes, 16), torch.randint(0, nodes, (2, 4 * nodes))
    y = torch.randint(0, 4, (nodes,)).to(device)
    x, edges = x.to(device), edges.to(device)
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trainer(device: str, small: bool) -> Step:
    """A short run of transformers' Trainer."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        PrinterCallback,
        Trainer,
        TrainingArguments,
    )

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    rows = [
        {"input_ids": torch.randint(0, 200, (32,)), "labels": index % 2}
        for index in range(32 if small else 256)
    ]
    directory = tempfile.TemporaryDirectory()
    arguments = TrainingArguments(
        directory.name, num_train_epochs=1, per_device_train_batch_size=16, report_to=[],
        use_cpu=device == "cpu", logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model: Any = BertForSequenceClassification(config)
    run = Trainer(model=model, args=arguments, train_dataset=rows)

    run.remove_callback(PrinterCallback)  # a runner's output is reserved for its answers

    def step() -> torch.Tensor:
        assert directory.name  # it exists as long as the program
        return torch.tensor(run.train().training_loss)

    return step


def save_and_load(device: str, small: bool) -> Step:
    """Save a state of 80 MB, and load it."""
    torch.manual_seed(0)
    width = 100 if small else 1000
    state = {f"weight{index}": torch.randn(width, width).to(device) for index in range(20)}

    def step() -> torch.Tensor:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        found: torch.Tensor = loaded["weight19"].mean()
        return found

    return step


def compiled(device: str, small: bool) -> Step:
    """A small model that is compiled in its first step."""
    torch.manual_seed(0)
    width = 16 if small else 128
    layers = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 10))
    model = torch.compile(nn.Sequential(*layers).to(device))
    inputs = torch.randn(16, width).to(device)
    targets = torch.randint(10, (16,)).to(device)

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.detach()

    return step


PROGRAMS: dict[str, Program] = {
    "prompt lookup": prompt_lookup, "svi": variational, "graph network": graph,
    "trainer": trainer, "save and load": save_and_load, "compiled": compiled,
}  # fmt: skip
