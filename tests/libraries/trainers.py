"""Libraries with their own training loop: accelerate, lightning, transformers' Trainer; and peft.

They choose the device themselves. peft changes models.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from tests.libraries.programs import noise, program, tokens, trained, weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# Without dropout: data loaders draw their seeds from the host's generator. Dropout draws its
# numbers from it, too, on the CPU, but not on CUDA.
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def data(count: int = 24) -> TensorDataset:
    return TensorDataset(noise(count, 8), tokens(count, below=8) - 5)


# -------------------------------------------------------------------- accelerate


def accelerated(device: str, **settings: Any) -> tuple[Accelerator, list[float], torch.Tensor]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(**settings)
    assert accelerator.device.type == device
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(data(), batch_size=4, shuffle=True, generator=torch.Generator())
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    set_seed(1)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return accelerator, losses, weights(accelerator.unwrap_model(model))


@program
def accelerator(device: str) -> object:
    _, losses, found = accelerated(device)
    return losses, found


@program
def accelerator_accumulating_in_bfloat16(device: str) -> object:
    _, losses, found = accelerated(device, mixed_precision="bf16", gradient_accumulation_steps=3)
    return losses, found


@program
def accelerator_saves_and_loads_its_state(device: str) -> object:
    accelerator, losses, found = accelerated(device)
    with tempfile.TemporaryDirectory() as directory:
        accelerator.save_state(directory)
        before = torch.rand(3, device=device)
        accelerator.load_state(directory)
        after = torch.rand(3, device=device)
    return losses, found, before, torch.equal(before, after)


# -------------------------------------------------------------------- autocast


@contextlib.contextmanager
def lists_of_the_cpu() -> Iterator[None]:
    """Let autocast for CUDA do what autocast for the CPU does, for the operators used here.

    Operators that only CUDA's lists name stay as they are. Of those that only the CPU's lists name,
    a loss is computed in float32.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCUDA")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that torch's kernel is overridden
        for name in torch._C._dispatch_get_all_op_names():
            own = name.startswith("aten::") and has(name, "AutocastCUDA")
            if own and not has(name, "AutocastCPU"):
                library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel)

    def in_float32(outputs: torch.Tensor, *arguments: Any) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return torch.ops.aten.cross_entropy_loss(outputs.float(), *arguments)

    library.impl("cross_entropy_loss", in_float32)
    try:
        yield
    finally:
        library._destroy()


# -------------------------------------------------------------------- lightning


# A loss that autocast computes with the same precision for CUDA as for the CPU.
def squares(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, F.one_hot(labels, 3).float())


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = squares(self.model(inputs), labels)
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, labels = batch
        self.log("validation", squares(self.model(inputs), labels))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(batch[0]).softmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


def fitted(
    device: str, directory: str, kind: type[Module] = Module, **settings: Any
) -> tuple[Any, Module]:
    warnings.filterwarnings("ignore", module="lightning")
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=directory, **{"accelerator": "auto", "max_epochs": 2, **settings},
    )  # fmt: skip
    module = kind()
    loader, validation = DataLoader(data(), batch_size=4), DataLoader(data(8), batch_size=4)
    trainer.fit(module, loader, validation)
    assert trainer.strategy.root_device.type == device
    return trainer, module


@program
def lightning_trainer(device: str) -> object:
    kind = "gpu" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        trainer, module = fitted(
            device, directory, accelerator=kind, gradient_clip_val=0.5, enable_checkpointing=False
        )
        predictions = trainer.predict(module, DataLoader(data(8), batch_size=4))
        metrics = trainer.validate(module, DataLoader(data(8), batch_size=4), verbose=False)
    return torch.stack(module.losses), weights(module), torch.cat(predictions), metrics


@program
def lightning_with_callbacks_and_mixed_precision(device: str) -> object:
    with tempfile.TemporaryDirectory() as directory:
        callbacks = [
            ModelCheckpoint(directory, monitor="validation", save_top_k=1),
            EarlyStopping("validation", patience=3),
            GradientAccumulationScheduler({0: 1, 1: 2}),
        ]
        trainer, module = fitted(
            device, directory, precision="bf16-mixed", callbacks=callbacks, max_epochs=3
        )
        best = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        assert next(best.parameters()).device.type == device
    return torch.stack(module.losses), weights(module), weights(best)


class Classifying(Module):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(F.layer_norm(self.model(inputs), (3,)), labels)
        self.losses.append(loss.detach())
        return loss


# The lists are the only difference: with the same ones, every bit is the same.
@program
def lightning_in_bfloat16_with_the_lists_of_the_cpu(device: str) -> object:
    with tempfile.TemporaryDirectory() as directory, lists_of_the_cpu():
        _, module = fitted(
            device, directory, Classifying, precision="bf16-mixed", enable_checkpointing=False
        )
    return torch.stack(module.losses), weights(module)


# -------------------------------------------------------------------- transformers' Trainer


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.rows = tokens(16, 10)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def small_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=16, n_layer=1, n_head=2, n_positions=16,
                   attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def trained_by_trainer(device: str, **settings: Any) -> object:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = small_gpt2()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
            use_cpu=device == "cpu", **settings,
        )  # fmt: skip
        assert arguments.device.type == device
        trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return losses, trainer.evaluate()["eval_loss"], weights(model)


@program
def trainer_of_transformers(device: str) -> object:
    ways = {
        "plain": {},
        "accumulating": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
        "checkpoints": {"gradient_checkpointing": True, "optim": "adamw_torch_fused"},
    }
    return {name: trained_by_trainer(device, **settings) for name, settings in ways.items()}


# Autocast has other lists of operators for CUDA than for the CPU, among them the layer norms of
# GPT-2. Thus precisions differ, as they would with a GPU.
@program(relative=1e-4, tensors=0.01)
def trainer_of_transformers_in_bfloat16(device: str) -> object:
    return trained_by_trainer(device, bf16=True)


@program
def trainer_in_bfloat16_with_the_lists_of_the_cpu(device: str) -> object:
    with lists_of_the_cpu():
        return trained_by_trainer(device, bf16=True)


@program
def trainer_saves_and_resumes(device: str) -> object:
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, max_steps=6, per_device_train_batch_size=4, save_steps=3, logging_steps=1,
            report_to=[], disable_tqdm=True, seed=1, use_cpu=device == "cpu",
        )  # fmt: skip
        first = small_gpt2()
        Trainer(first, arguments, train_dataset=Sentences()).train()
        second = small_gpt2()
        resumed = Trainer(second, arguments, train_dataset=Sentences())
        resumed.train(resume_from_checkpoint=str(Path(directory) / "checkpoint-3"))
    return weights(first), torch.equal(weights(first), weights(second))


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": noise(3, 16, 16, seed=index), "labels": index % 4}


def right(found: Any) -> dict[str, int]:
    return {"right": int((found.predictions.argmax(-1) == found.label_ids).sum())}


@program
def trainer_fed_by_workers(device: str) -> object:
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(image_size=16, patch_size=8, num_labels=4, hidden_size=16, intermediate_size=32,
                  num_hidden_layers=1, num_attention_heads=2)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, seed=1,
            dataloader_num_workers=2, dataloader_persistent_workers=True, save_strategy="no",
            eval_strategy="epoch", lr_scheduler_type="cosine", warmup_steps=2, max_grad_norm=0.3,
            label_smoothing_factor=0.1, report_to=[], disable_tqdm=True, use_cpu=device == "cpu",
        )  # fmt: skip
        trainer = Trainer(
            model, arguments, train_dataset=Images(), eval_dataset=Images(), compute_metrics=right
        )
        trainer.train()
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")
        history = [{k: row[k] for k in kept if k in row} for row in trainer.state.log_history]
        return history, weights(model), torch.from_numpy(trainer.predict(Images()).predictions)


# -------------------------------------------------------------------- peft


def small_llama(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
                    pad_token_id=0)
    ).to(device)  # fmt: skip


@program
def lora_trained_merged_and_loaded(device: str) -> object:
    model = get_peft_model(
        small_llama(device),
        LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )
    batch = tokens(4, 12).to(device)
    losses = trained(model, lambda: model(input_ids=batch, labels=batch).loss, steps=4)
    model.eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        adapted = model(batch).logits
        with model.disable_adapter():
            without = model(batch).logits
        model.save_pretrained(directory)
        loaded = PeftModel.from_pretrained(small_llama(device), directory).eval()
        again = loaded(batch).logits
        merged = model.merge_and_unload()(batch).logits
    return losses, adapted, without, torch.equal(adapted, again), merged


@program
def lora_with_magnitudes(device: str) -> object:
    model = get_peft_model(
        small_llama(device),
        LoraConfig(r=2, target_modules="all-linear", use_dora=True, use_rslora=True),
    )
    batch = tokens(2, 12).to(device)
    losses = trained(model, lambda: model(input_ids=batch, labels=batch).loss)
    prompt = tokens(2, 5).to(device)
    with torch.no_grad():
        generated = model.eval().generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8,
            do_sample=False,
        )  # fmt: skip
    return losses, generated


# The operators that autocast leaves in single precision differ on the CPU.
@program(relative=1e-4)
def lora_in_bfloat16_with_gradient_checkpoints(device: str) -> object:
    model = get_peft_model(small_llama(device), LoraConfig(r=4, init_lora_weights="olora"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    batch = tokens(4, 12).to(device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(input_ids=batch, labels=batch).loss

    return trained(model, loss, steps=4)
