"""Models of transformers that encode, and that decode what was encoded: BERT, ViT, T5, Whisper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

from tests.libraries.programs import noise, program, tokens, trained

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def made(device: str, kind: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    return kind(kind.config_class(**config)).to(device)


def bert(device: str, kind: Any, **changes: Any) -> Any:
    assert kind.config_class is BertConfig
    return made(device, kind, vocab_size=128, max_position_embeddings=64, **SMALL, **changes)


def padded(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids of sequences of several lengths, and their mask."""
    mask = torch.arange(12) < torch.tensor([[12], [9], [5], [1]])
    return (tokens(4, 12) * mask).to(device), mask.long().to(device)


@program
def bert_restores_masked_words(device: str) -> object:
    model = bert(device, BertForMaskedLM)
    ids, mask = padded(device)
    masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = ids.masked_fill(~masked.to(device), -100)
    corrupted = ids.masked_fill(masked.to(device), 4)

    def loss() -> torch.Tensor:
        return model(input_ids=corrupted, attention_mask=mask, labels=labels).loss

    losses = trained(model, loss, steps=4)
    model.eval()
    with torch.no_grad():
        return losses, model(corrupted, attention_mask=mask).logits.argmax(-1)


@program
def bert_classifies(device: str) -> object:
    model = bert(device, BertForSequenceClassification, num_labels=3)
    ids, mask = padded(device)
    labels = torch.tensor([0, 2, 1, 1]).to(device)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "Norm" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n or "Norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], 5e-4
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 6)

    def loss() -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def after() -> None:
        schedule.step()

    losses = trained(model, loss, steps=5, optimizer=optimizer, after=after)
    return losses, schedule.get_last_lr(), model.eval()(ids, attention_mask=mask).logits


@program
def bert_with_frozen_layers_and_clipping(device: str) -> object:
    model = bert(device, BertForSequenceClassification, num_labels=2, problem_type="regression")
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    ids, mask = padded(device)
    labels = noise(4, 2).to(device)
    norms = []

    def loss() -> torch.Tensor:
        value = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        return value

    return trained(model, loss), torch.stack(norms)


@program
def vit_trained(device: str) -> object:
    model = made(
        device, ViTForImageClassification, image_size=32, patch_size=8, num_labels=10, **SMALL
    )
    assert isinstance(model.config, ViTConfig)
    images, labels = noise(4, 3, 32, 32).to(device), tokens(4, below=10).to(device)
    losses = trained(model, lambda: model(pixel_values=images, labels=labels).loss, steps=4)
    model.eval()
    with torch.no_grad():
        larger = model(noise(2, 3, 48, 48).to(device), interpolate_pos_encoding=True).logits
    return losses, larger


@program
def clip_compares_texts_and_images(device: str) -> object:
    text = {**SMALL, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = CLIPModel(config).to(device)
    ids, images = tokens(3, 10).to(device), noise(3, 3, 32, 32).to(device)
    losses = trained(
        model, lambda: model(input_ids=ids, pixel_values=images, return_loss=True).loss
    )
    return losses, model.eval()(input_ids=ids, pixel_values=images).logits_per_image


@program
def t5_trained_and_translating(device: str) -> object:
    model = made(
        device, T5ForConditionalGeneration, vocab_size=128, d_model=32, d_kv=8, d_ff=64,
        num_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    assert isinstance(model.config, T5Config)
    ids, mask = padded(device)
    labels = tokens(4, 7, seed=5).to(device)

    def loss() -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    losses = trained(model, loss, steps=4)
    model.eval()
    torch.manual_seed(2)
    with torch.no_grad():
        return (
            losses,
            model.generate(ids, attention_mask=mask, max_new_tokens=10),
            model.generate(ids, attention_mask=mask, max_new_tokens=10, num_beams=3),
            model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=True),
        )


@program
def whisper_trained_and_listening(device: str) -> object:
    config = {
        "vocab_size": 128, "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 50,
        "max_target_positions": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None,
    }  # fmt: skip
    model = made(device, WhisperForConditionalGeneration, **config)
    assert isinstance(model.config, WhisperConfig)
    sound, labels = noise(2, 16, 100).to(device), tokens(2, 8).to(device)
    losses = trained(model, lambda: model(input_features=sound, labels=labels).loss, steps=3)
    model.eval()
    with torch.no_grad():
        torch.manual_seed(2)
        return (
            losses,
            model.generate(sound, max_new_tokens=12, do_sample=False),
            model.generate(sound, max_new_tokens=12, num_beams=3),
            model.generate(sound, max_new_tokens=12, do_sample=True),
        )
