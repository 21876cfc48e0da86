"""A tiny random model with a byte tokenizer in a folder, as `--target` takes it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


def save(folder: Path, seed: int = 0, initializer_range: float = 0.3, max_positions: int = 512) -> Path:
    """Save a two-layer Llama over bytes; `<s>` is 0, `</s>` 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=initializer_range,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


_HELD: list[tempfile.TemporaryDirectory[str]] = []


@cache
def small(name: str = "llama", seed: int = 7) -> str:
    """A folder with one of the models of `tiny.py`, for drafting, and a tokenizer of its 97 tokens."""
    _HELD.append(tempfile.TemporaryDirectory())
    folder = _HELD[-1].name
    tiny.model(name, seed=seed).save_pretrained(folder)
    words = {f"w{number}": number for number in range(tiny.VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))).save_pretrained(folder)
    return folder
