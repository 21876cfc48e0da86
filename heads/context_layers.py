"""Decoder layers whose keys and values begin with those of a context from elsewhere (DFlash and its kin).

Letters: B rows, T places, S places attended to, D hidden size, H attention heads, K key-value heads, d head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from selfspec.heads.layers import Attention, DecoderLayer, KeyStore, LayerShape, RMSNorm, rotate

Turn = tuple[Tensor, Tensor]


class ContextAttention(Attention):
    """Attention with norms on queries and keys, as in Qwen3, that looks wherever the mask lets it."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, K, T, d]` of `[B, T, D]`."""
        return rotate(self.k_norm(self._split(self.k_proj(x))), *turn), self._split(self.v_proj(x))

    def forward(self, x: Tensor, turn: Turn, mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """As `Attention.forward`, but a mask of None lets every place see every other."""
        query = rotate(self.q_norm(self._split(self.q_proj(x))), *turn)
        key, value = self.keys(x, turn)
        if store is not None:
            key, value = store.update(key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class ContextLayer(DecoderLayer):
    """A decoder layer with `ContextAttention`."""

    self_attn: ContextAttention

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.self_attn = ContextAttention(shape)

    def read(self, context: Tensor, turn: Turn, store: KeyStore) -> None:
        """Put the keys and values of the context `[B, T, D]` into the store; no norm of this layer applies to it."""
        store.update(*self.self_attn.keys(context, turn))
