"""Train a small GPT-2 with the Trainer of transformers, as its examples do: ``trainer.py OUTPUT``.

Started by torchrun. Each rank prints its device, the number of ranks, and the hash of its weights.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random texts."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(output: str) -> None:
    set_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output, per_device_train_batch_size=4, max_steps=6, logging_steps=3, save_steps=6,
        report_to=[], disable_tqdm=True, dataloader_num_workers=1,
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts())
    trainer.train()
    bits = hashlib.sha256()
    assert trainer.model is not None
    for weight in trainer.model.parameters():
        bits.update(weight.detach().cpu().numpy().tobytes())
    place = f"rank {arguments.local_process_index} of {arguments.world_size}"
    line = f"{place} on {arguments.device}: {bits.hexdigest()[:16]}\n"
    os.write(sys.stdout.fileno(), line.encode())  # other ranks write to the same pipe


if __name__ == "__main__":
    main(sys.argv[1])
