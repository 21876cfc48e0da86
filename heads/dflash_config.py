"""Configuration of block drafters (DFlash, DSpark, JetSpec)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec.errors import ConfigError
from selfspec.heads.layers import LayerShape
from selfspec.heads.losses import TaughtConfig
from selfspec.target import Target

_TRIED = 512


@dataclass(kw_only=True)
class DFlashConfig(TaughtConfig):
    """Configuration of a DFlash head. Dimensions of 0 are taken from the target.

    Args:
        num_layers: decoder layers.
        taps: which of the target's hidden states are read, k being the input of block k. Published configs name layer
            outputs (`target_layer_ids`), one less. Empty spreads up to five over the target.
        block_size: S.
        mask_token_id: the token that stands for a place to guess; -1 takes the last one whose embedding is not zero
            (the end of a vocabulary is seldom used).
        causal: slots see earlier slots of their block only.
        intermediate_size: of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of one head.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are scaled, as transformers' `rope_parameters` without the base: `rope_type` llama3,
            linear, yarn or longrope, and its numbers. None leaves them plain, whatever the target does.
        rms_norm_eps: of all norms.
        attention_bias: biases of the query, key and value projections.
        tree_nodes: nodes of a tree, the root included, unless the budget says otherwise.
        tree_top_k: C; 1 gives a chain.
        draw: while sampling, draw one chain from the block's marginals, instead of choosing a tree.
        anchors: blocks per sequence in training.
        position_decay: slot j counts `exp(-position_decay * (j - 1))` in the loss; 0 counts all alike, a negative value
            takes 2 / S (the paper has 1/4, 1/5 and 1/7 for blocks of 8, 10 and 16).
    """

    num_layers: int = 2
    taps: list[int] = field(default_factory=list)
    block_size: int = 8
    mask_token_id: int = -1
    causal: bool = False
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tree_nodes: int = 12
    tree_top_k: int = 4
    draw: bool = False
    anchors: int = 64
    position_decay: float = -1.0


def default_taps(layers: int) -> list[int]:
    """Up to five hidden states between the second block and the third last, as published configs spread them."""
    count = min(5, layers)
    if count < 3:
        return list(range(count))
    first = 2 if layers > 5 else 1
    last = max(layers - 2, first)
    spread = [round(first + i * (last - first) / (count - 1)) for i in range(count)]
    return sorted(set(spread))


def _last_embedded_token(target: Target) -> int:
    table = target.input_weight()
    size = target.vocab_size if table is None else min(target.vocab_size, table.shape[0])
    for token in itertools.islice(range(size - 1, -1, -1), _TRIED):
        if bool(target.embed(torch.tensor([token], device=target.device)).any()):
            return token
    raise ConfigError(f"the last {_TRIED} tokens of the target have zero embeddings; name a mask_token_id")


def fill_from_target(config: DFlashConfig, target: Target) -> None:
    """Write down what the target decides."""
    base = target.config
    config.taps = list(config.taps) or default_taps(target.num_layers)
    if config.mask_token_id < 0:
        config.mask_token_id = _last_embedded_token(target)
    heads = config.num_attention_heads = config.num_attention_heads or base.num_attention_heads
    config.num_key_value_heads = config.num_key_value_heads or getattr(base, "num_key_value_heads", None) or heads
    config.head_dim = config.head_dim or getattr(base, "head_dim", None) or config.hidden_size // heads
    config.intermediate_size = (
        config.intermediate_size or getattr(base, "intermediate_size", None) or 4 * config.hidden_size
    )


def check(config: DFlashConfig, target: Target) -> None:
    """Raise ConfigError, naming the field, when no head can be built."""
    if config.num_layers < 1 or config.block_size < 2 or config.anchors < 1:
        raise ConfigError(
            f"a block drafter wants a layer, a block of 2 and an anchor, got {config.num_layers}, "
            f"{config.block_size} and {config.anchors}"
        )
    if sorted(set(config.taps)) != config.taps or not 0 <= config.taps[0] <= config.taps[-1] < target.num_layers:
        raise ConfigError(
            f"taps {config.taps} are not rising indices in 0..{target.num_layers - 1}; k is the input of block k"
        )
    if config.mask_token_id >= config.vocab_size:
        raise ConfigError(f"mask_token_id {config.mask_token_id} is not in the vocabulary of {config.vocab_size}")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim {config.head_dim} is odd; rotary positions need pairs")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} key-value heads"
        )
    if config.tree_nodes < 1 or config.tree_top_k < 1:
        raise ConfigError(f"a tree of {config.tree_nodes} nodes from {config.tree_top_k} ranks is no tree")


def layer_shape(config: DFlashConfig) -> LayerShape:
    """Dimensions of the decoder layers."""
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
    )
