"""Tiny random targets built in code: float32, fixed seed, nothing downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from selfspec.cache import SlotCache
from selfspec.draft import Verified
from selfspec.target import Target

VOCAB = 97
WINDOW = 8
HIDDEN = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**_COMMON, num_hidden_layers=3, num_key_value_heads=2)


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_COMMON, num_hidden_layers=2, num_key_value_heads=2, head_dim=8)


def _gemma3() -> PreTrainedConfig:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(
        **{**_COMMON, "tie_word_embeddings": True},
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=kinds,
    )


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_COMMON, num_hidden_layers=2, num_key_value_heads=2, sliding_window=WINDOW)


def _gpt_neox() -> PreTrainedConfig:
    return GPTNeoXConfig(**_COMMON, num_hidden_layers=2)


_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "mistral": _mistral,
    "gpt_neox": _gpt_neox,
}
NAMES = tuple(_CONFIGS)


def model(name: str, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """A random causal language model of one of the families in NAMES, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = AutoModelForCausalLM.from_config(_CONFIGS[name](), attn_implementation=attention, dtype=torch.float32)
    return built.eval().requires_grad_(False)


def selfspec_target(name: str, attention: str = "sdpa", seed: int = 0) -> Target:
    """The same as a Target."""
    return Target(model(name, attention, seed))


def text(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids `[batch, length]`, none of them the padding token."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def chunk(verified: Verified, start: int, stop: int) -> Verified:
    """Places `start..stop` of every row, for rows that are all at least that long."""

    def cut(values: Tensor) -> Tensor:
        return values[:, start:stop]

    return Verified(
        cut(verified.tokens),
        cut(verified.next_tokens),
        (verified.counts - start).clamp(1, stop - start),
        None if verified.hidden is None else cut(verified.hidden),
        tuple(cut(layer) for layer in verified.layers),
        cache=None if verified.cache is None else cut_cache(verified.cache, [stop] * len(verified.counts)),
    )


def cut_cache(cache: SlotCache, lengths: list[int], rows: list[int] | None = None) -> SlotCache:
    """A copy with the first `lengths[b]` tokens of some rows; what follows them is rubbish."""
    copied = copy.deepcopy(cache)
    if rows is not None:
        copied.select(rows)
    copied.slots.advance([wanted - found for wanted, found in zip(lengths, copied.lengths, strict=True)])
    for layer in copied.layers:
        for row, length in enumerate(lengths):
            layer.stored_keys[row, :, length:] = 1e3
            layer.stored_values[row, :, length:] = 1e3
    return copied
