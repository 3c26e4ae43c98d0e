"""Language models of transformers that predict the next token: training, and ways to generate."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MistralForCausalLM,
    MixtralForCausalLM,
)
from transformers.generation import BaseStreamer

from tests.libraries.programs import program, tokens, trained

VOCABULARY = 128
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(device: str, **changes: Any) -> GPT2LMHeadModel:
    config = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **changes}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **SPECIAL, **config)).to(device)


def llama(device: str, kind: Any = LlamaForCausalLM, **changes: Any) -> Any:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **SPECIAL,
        **changes,
    }
    torch.manual_seed(0)
    return kind(kind.config_class(**config)).to(device)


def generated(model: Any, device: str, **ways: Any) -> torch.Tensor:
    prompt = tokens(2, 9).to(device)
    model.eval()
    torch.manual_seed(2)
    ways = {"max_new_tokens": 20, "do_sample": False, **ways}
    mask = ways.pop("attention_mask", torch.ones_like(prompt))
    with torch.no_grad():
        return model.generate(prompt, attention_mask=mask, **ways)


def loss(model: Any, device: str, *sizes: int) -> Any:
    batch = tokens(*(sizes or (4, 16))).to(device)
    return lambda: model(input_ids=batch, labels=batch).loss


@program
def gpt2_trained_and_generating(device: str) -> object:
    model = gpt2(device)
    losses = trained(model, loss(model, device), steps=4)
    return losses, generated(model, device), generated(model, device, do_sample=True, top_k=30)


@program
def gpt2_with_eager_attention(device: str) -> object:
    model = gpt2(device, attn_implementation="eager")
    return trained(model, loss(model, device)), generated(model, device)


@program
def llama_trained_and_generating(device: str) -> object:
    model = llama(device)
    losses = trained(model, loss(model, device), steps=4)
    sampled = generated(model, device, do_sample=True, top_p=0.9, temperature=0.8)
    return losses, generated(model, device), sampled


@program
def llama_with_gradient_checkpoints(device: str) -> object:
    model = llama(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    first = trained(model, loss(model, device))
    model = llama(device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return first, trained(model, loss(model, device))


@program
def llama_with_other_rotations(device: str) -> object:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    scaled = generated(llama(device, rope_parameters=rope), device)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = llama(device, rope_parameters=dynamic, max_position_embeddings=16)
    return scaled, generated(model, device)


@program
def beams(device: str) -> object:
    model = gpt2(device)
    found = generated(
        model, device, num_beams=4, num_return_sequences=2, return_dict_in_generate=True,
        output_scores=True, length_penalty=0.8, no_repeat_ngram_size=3,
    )  # fmt: skip
    sampled = generated(model, device, num_beams=3, do_sample=True)
    return found.sequences, found.sequences_scores, sampled


@program
def batches_padded_on_the_left(device: str) -> object:
    model = llama(device)
    prompt = tokens(2, 9)
    prompt[1, :4] = 0
    mask = (prompt != 0).long().to(device)
    model.eval()
    with torch.no_grad():
        greedy = model.generate(
            prompt.to(device), attention_mask=mask, max_new_tokens=12, do_sample=False
        )
        logits = model(prompt.to(device), attention_mask=mask).logits[:, -1]
    return greedy, logits


@program
def caches_of_other_kinds(device: str) -> object:
    model = llama(device)
    static = generated(model, device, cache_implementation="static", disable_compile=True)
    without = generated(model, device, use_cache=False)
    again = generated(model, device, past_key_values=DynamicCache())
    return static, without, again, torch.equal(static, without), torch.equal(static, again)


@program
def a_cache_offloaded_to_the_host(device: str) -> object:
    if device == "cpu":  # it needs an accelerator, and must not change results
        return generated(llama(device), device)
    return generated(llama(device), device, cache_implementation="offloaded")


@program
def a_draft_is_assisting(device: str) -> object:
    model = llama(device)
    draft = llama(device, num_hidden_layers=1)
    prompt = tokens(1, 9).to(device)
    with torch.no_grad():
        return model.eval().generate(
            prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft.eval(),
            max_new_tokens=16, do_sample=False,
        )  # fmt: skip


@program
def tokens_looked_up_in_the_prompt(device: str) -> object:
    prompt = tokens(1, 6).repeat(1, 3).to(device)
    model = llama(device).eval()
    with torch.no_grad():
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), prompt_lookup_num_tokens=4,
            max_new_tokens=16, do_sample=False,
        )  # fmt: skip


@program
def logits_processed(device: str) -> object:
    model = gpt2(device)
    penalties = LogitsProcessorList([MinLengthLogitsProcessor(12, 2, device=device)])
    found = generated(
        model, device, repetition_penalty=1.3, logits_processor=penalties, bad_words_ids=[[7], [8]],
        typical_p=0.9, min_p=0.02, do_sample=True, forced_eos_token_id=2,
    )  # fmt: skip
    scored = generated(
        model, device, output_scores=True, output_logits=True, output_attentions=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    steps = model.compute_transition_scores(scored.sequences, scored.scores, normalize_logits=True)
    return found, scored.sequences, torch.stack(scored.logits), steps


@program
def mistral_trained_and_generating(device: str) -> object:
    model = llama(device, MistralForCausalLM, sliding_window=8)
    return trained(model, loss(model, device, 2, 24)), generated(model, device)


@program
def a_mixture_of_experts(device: str) -> object:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = llama(device, MixtralForCausalLM, **experts)
    return trained(model, loss(model, device, 2, 12)), generated(model, device, max_new_tokens=8)


@program
def tokens_streamed_until_enough(device: str) -> object:
    def enough(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (ids == 17).any(1) | (torch.tensor(ids.shape[1], device=ids.device) > 20)

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.append(value.tolist())

        def end(self) -> None:
            seen.append([])

    seen: list[list[int]] = []
    prompt = tokens(1, 5).to(device)
    torch.manual_seed(2)
    found = gpt2(device).eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=[enough],
        streamer=Streamer(), max_new_tokens=30, do_sample=False, guidance_scale=1.5,
    )  # fmt: skip
    return found, seen


@program
def half_precision(device: str) -> object:
    model = llama(device).to(torch.bfloat16)
    return trained(model, loss(model, device)), generated(model, device)


@program
def hidden_states_and_attentions(device: str) -> object:
    model = llama(device, attn_implementation="eager").eval()
    with torch.no_grad():
        out = model(tokens(2, 9).to(device), output_hidden_states=True, output_attentions=True)
    return out.logits, out.hidden_states, out.attentions


@program
def tied_weights_saved_and_loaded(device: str) -> object:
    import tempfile

    model = gpt2(device)
    losses = trained(model, loss(model, device))
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        loaded = GPT2LMHeadModel.from_pretrained(directory, device_map=device)
    shared = loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    same = all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    return losses, shared, same, generated(loaded, device)
