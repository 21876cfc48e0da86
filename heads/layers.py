"""Layers that draft methods share.

Letters: B rows, T places, S places attended to, D hidden size, H attention heads, K key-value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`w * x / sqrt(mean(x^2) + eps)` (Zhang and Sennrich 2019), statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotary(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary position embedding (Su et al. 2021), float32, `[B, 1, T, d]` each.

    Computed from the positions at hand, so no table limits the length.

    Args:
        positions: `[B or 1, T]` int64.
        size: d.
        theta: base of the frequencies.
    """
    exponent = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angle = positions.unsqueeze(1).unsqueeze(-1) * theta**-exponent
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys `[B, H, T, d]` by their positions; halves are paired as in Llama."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def draw_weights(
    module: nn.Module,
    generator: torch.Generator | None,
    small: float = 0.02,
    zero: tuple[str, ...] = (),
    keep: tuple[str, ...] = ("output.",),
) -> None:
    """Starting weights: matrices normal with deviation 0.02, biases 0, vectors of norms 1.

    Args:
        module: its parameters are set.
        generator: of the normal numbers.
        small: the deviation of what a decoder layer adds to its input.
        zero: beginnings of names that start at 0.
        keep: beginnings of names of matrices that are left alone.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias") or name.startswith(zero):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif not name.startswith(keep):
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=small if added else 0.02, generator=generator)


class KeyStore(Protocol):
    """Takes the keys and values of the places at hand, gives back those to attend to."""

    def update(self, key_states: Tensor, value_states: Tensor, /) -> tuple[Tensor, Tensor]:
        """`[B, K, T, d]` each to `[B, K, S, d]` each."""


class StepStore:
    """Keys and values of several passes over the same places, side by side: what unrolled training attends to."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, /) -> tuple[Tensor, Tensor]:
        """`[B, K, T, d]` each to `[B, K, passes * T, d]` each."""
        self.keys.append(key_states)
        self.values.append(value_states)
        return torch.cat(self.keys, 2), torch.cat(self.values, 2)


@dataclass(frozen=True)
class LayerShape:
    """Dimensions and options of a decoder layer, by their names in Hugging Face configs."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool = False
    qk_norm: bool = False
    input_norm: bool = True
    attention_size: int = 0
    """What queries, keys and values are made from, where it is wider than the residual stream."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, as in Llama."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner, outer = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        size = shape.attention_size or shape.hidden_size
        self.q_proj = nn.Linear(size, inner, bias=shape.attention_bias)
        self.k_proj = nn.Linear(size, outer, bias=shape.attention_bias)
        self.v_proj = nn.Linear(size, outer, bias=shape.attention_bias)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else nn.Identity()

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """See `DecoderLayer.forward`."""
        return self._attend(x, x, turn, mask, store)

    def _attend(
        self, asked: Tensor, read: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        query = rotate(self.q_norm(self._split(self.q_proj(asked))), *turn)
        key, value = rotate(self.k_norm(self._split(self.k_proj(read))), *turn), self._split(self.v_proj(read))
        if store is not None:
            key, value = store.update(key, value)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class CrossAttention(Attention):
    """Attention whose queries are made from something else than its keys and values."""

    def forward(  # type: ignore[override]
        self, asked: Tensor, read: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        """`[B, T, D]` twice, queries first; the rest as in `DecoderLayer.forward`."""
        return self._attend(asked, read, turn, mask, store)


class GatedMLP(nn.Module):
    """`down(silu(gate x) * up x)` (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One Llama decoder layer, with parameter names as in Hugging Face's."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size)
        if shape.input_norm:
            self.input_layernorm: nn.Module = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        else:
            self.input_layernorm = nn.Identity()
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, store: KeyStore | None = None
    ) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`.

        Args:
            x: the residual stream.
            turn: see `rotary`.
            mask: `[B or 1, 1, T, S]` bool, true where a place may look; None is causal over the T places.
            store: holds earlier places; None attends to the T places alone.
        """
        x = x + self.self_attn(self.input_layernorm(x), turn, mask, store)
        return x + self.mlp(self.post_attention_layernorm(x))


class ResidualBlocks(nn.Module):
    """M stacks of N residual blocks `x + silu(W x + b)`, run side by side (Cai et al. 2024, section 2.1).

    All blocks start at zero, so every stack starts as the identity.
    """

    def __init__(self, stacks: int, blocks: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(blocks, stacks, size, size))
        self.bias = nn.Parameter(torch.zeros(blocks, stacks, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        """`[P, D]` to `[M, P, D]`."""
        blocks, stacks, size, _ = self.weight.shape
        x = x.expand(stacks, -1, -1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = x + F.silu(torch.baddbmm(bias, x, weight.transpose(1, 2)))
        return x
