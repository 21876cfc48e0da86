"""Hydra: heads that read the tokens guessed before them (Ankner et al. 2024, sections 3 and 4).

Letters: B rows, T places, N tree nodes, k beams, M heads, D hidden size, Q draft vocabulary, P supervised places.
Head j (from 0) at place i reads the prefix's vector and the embeddings of tokens i + 1 .. i + 1 + j, and guesses token
i + 2 + j. With f the target's feature, E the embedding and [;] concatenation:

    prefix_i = f_i, or norm(decoder layer over f)_i      Hydra++: "prefix attention"
    z = [prefix_i; E(t_(i+1)); ..; E(t_(i+1+j))]
    x = R z + b + silu(A z + c),   then x <- x + silu(A_l x + c_l),   logits = output(x)

The peer's attention variants are heads of the EAGLE kind: `eagle-attn` is `eagle` with `input_norms` and `output_norm`
false and `fc_bias` true; `cross-attn` is `hydra-cross` below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified, last_of
from selfspec.draft_output import DraftOutput
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.autoregressive import (
    AutoregressiveConfig,
    AutoregressiveHead,
    LayeredConfig,
    causal_over_cache,
    fill_from_target,
    layer_shape,
)
from selfspec.heads.layers import CrossAttention, DecoderLayer, GatedMLP, RMSNorm, draw_weights
from selfspec.heads.losses import denominator, learn, taught_places, teach_at
from selfspec.heads.rotary import Rotary
from selfspec.heads.trees import TreePlanner
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, Path

_ROOM = 512


@dataclass(kw_only=True)
class HydraConfig(LayeredConfig):
    """Configuration of Hydra heads. The published recipe (Hydra++) has `prefix_attention` and `mlp_blocks` 4.

    Args:
        num_heads: M, the deepest guess.
        mlp_blocks: residual blocks per head, the first of which joins the inputs.
        prefix_attention: a decoder layer (`num_layers` of them) over the features, with keys and values of its own.
        grounded: read the guessed tokens; false makes heads of the Medusa kind, which the format allows.
        hidden_state_offset: read the state this many blocks below the last hidden state, before the final norm.
        embedding_norm: a norm on embeddings; published heads have none.
        output_per_head: an output matrix of its own for each head, as published heads have.
        output_bias: with a bias (only with `output_per_head`).
        head_decay: head j counts `head_decay ** j` in the loss.
    """

    num_heads: int = 4
    mlp_blocks: int = 1
    prefix_attention: bool = True
    grounded: bool = True
    hidden_state_offset: int = 0
    embedding_norm: bool = True
    output_per_head: bool = False
    output_bias: bool = False
    head_decay: float = 0.8


@dataclass(eq=False)
class HydraState(DraftState):
    """Keys and values of the prefix layers, the newest token `[B]`, and the newest prefix vector `[B, D]`."""

    cache: SlotCache
    root: Tensor
    prefix: Tensor

    def select(self, rows: Tensor) -> HydraState:
        """The state of some rows."""
        self.cache.select(rows.tolist())
        return HydraState(self.cache, self.root[rows], self.prefix[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: HydraState) -> HydraState:
        """See `DraftState.join`."""
        self.cache.join(other.cache)
        root, prefix = torch.cat([self.root, other.root]), torch.cat([self.prefix, other.prefix])
        return HydraState(self.cache, root, prefix)


class HydraMLP(nn.Module):
    """One head: the inputs joined, then residual blocks. Starts as the identity on the prefix's vector."""

    def __init__(self, inputs: int, size: int, blocks: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * size, size)
        self.res_connection = nn.Linear(inputs * size, size)
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(blocks - 1))

    def forward(self, z: Tensor) -> Tensor:
        """`[..., inputs * D]` to `[..., D]`."""
        x = self.res_connection(z) + F.silu(self.linear(z))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


@register("hydra")
class Hydra(DraftHead):
    """M sequentially dependent MLP heads, with or without a layer of attention over the prefix."""

    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig, target: Target) -> None:
        super().__init__(config, target)
        fill_from_target(config, target, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        _check(config, target)
        size, eps = config.hidden_size, config.rms_norm_eps
        if config.output_per_head:
            self.output = DraftOutput(
                target, config.draft_vocab_size, own=True, stacks=config.num_heads, own_bias=config.output_bias
            )
        self.embedding_norm = RMSNorm(size, eps) if config.embedding_norm else nn.Identity()
        layers = config.num_layers if config.prefix_attention else 0
        self.layers = nn.ModuleList(DecoderLayer(layer_shape(config, size)) for _ in range(layers))
        self.norm = RMSNorm(size, eps) if config.prefix_attention else nn.Identity()
        self.heads = nn.ModuleList(
            HydraMLP(2 + j if config.grounded else 1, size, config.mlp_blocks) for j in range(config.num_heads)
        )
        self._planner = TreePlanner(
            config.choices,
            config.tree_nodes,
            config.tree_depth,
            config.tree_top_k,
            config.num_heads,
            self.output.vocab.size,
        )

    @property
    def choices(self) -> list[Path] | None:
        """The static tree as paths of ranks, best first; None where trees are grown."""
        return self._planner.choices

    @property
    def needs(self) -> Needs:
        """The last hidden state (for the teacher too), and the one below it that is read."""
        offset = self.config.hidden_state_offset
        return Needs(hidden=True, layers=(self.target.num_layers - offset,) if offset else ())

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """At first every head repeats the target's own next token: MLPs add nothing, the prefix layer little."""
        draw_weights(self, generator, small=0.002, zero=("heads.",))
        with torch.no_grad():
            for head in self.heads:
                head.get_parameter("res_connection.weight")[:, : self.config.hidden_size].diagonal().fill_(1)
            if isinstance(self.norm, RMSNorm):
                self.norm.weight.fill_(float(self.target.hidden_scale(generator).pow(2).mean().sqrt()))

    def _prefix(self, verified: Verified, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]) -> Tensor:
        """The prefix's vector at every place, `[B, T, D]`."""
        states = verified.layers[0] if self.config.hidden_state_offset else verified.hidden
        assert states is not None
        x = states.to(next(self.heads.parameters()))
        if not self.config.prefix_attention:
            return x
        turn = self.rotary(positions)
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, turn, mask, store)
        return self.norm(x)

    def _head(self, j: int, prefix: Tensor, tokens: Tensor) -> Tensor:
        """What head j makes of prefix vectors `[.., D]` and the j + 1 tokens after them `[.., j + 1]`."""
        if not self.config.grounded:
            return self.heads[j](prefix)
        embedded = self.embedding_norm(self.target.embed(tokens).detach().to(prefix))
        return self.heads[j](torch.cat([prefix, embedded.flatten(-2)], -1))

    def _stack(self, j: int) -> int | None:
        return j if self.config.output_per_head else None

    # Decoding

    @torch.no_grad()
    def begin(self, verified: Verified) -> HydraState:
        """Read the prompt's features."""
        batch, places = verified.tokens.shape
        return self._read(SlotCache([None] * len(self.layers), batch, places + _ROOM, verified.tokens.device), verified)

    @torch.no_grad()
    def observe(self, state: HydraState, verified: Verified) -> HydraState:
        """Read the accepted features."""
        return self._read(state.cache, verified)

    def _read(self, cache: SlotCache, verified: Verified) -> HydraState:
        positions = cache.slots.index(verified.tokens.shape[1])
        prefix = self._prefix(verified, positions, causal_over_cache(cache, positions), cache.layers)
        cache.commit(verified.count_list)
        return HydraState(cache, verified.root, last_of(prefix, verified.counts))

    @torch.no_grad()
    def propose(
        self, state: HydraState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Grow a tree, head by head; every node is guessed from its own path."""
        tree = self._planner.start(state.root, budget)
        if tree is None:
            return DraftTree.root_only(state.root)
        paths = state.root[:, None, None]
        level = 0
        while True:
            prefix = state.prefix.unsqueeze(1).expand(-1, paths.shape[1], -1)
            columns, origin = tree.grow(self.output(self._head(level, prefix, paths), self._stack(level)))
            if tree.done:
                break
            parents = paths.gather(1, origin.unsqueeze(-1).expand(-1, -1, paths.shape[-1]))
            paths = torch.cat([parents, self.output.vocab.to_target(columns).unsqueeze(-1)], -1)
            level += 1
        columns, shape = tree.finish()
        return DraftTree(torch.cat([state.root.unsqueeze(1), self.output.vocab.to_target(columns)], 1), shape)

    # Training

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """Sum over heads of `head_decay ** j` times the configured loss against the target's distribution.

        Head j at place i reads the text's own tokens i + 1 .. i + 1 + j; its teacher is the target at place i + 1 + j,
        given a token of the draft vocabulary. `correct` counts where the first choice is the teacher's first choice.
        """
        assert verified.hidden is not None
        row, column = taught_places(verified, mask)
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        positions = torch.arange(mask.shape[1], device=mask.device).unsqueeze(0)
        prefix = self._prefix(verified, positions, None, [None] * len(self.layers))
        loss, correct, seen = prefix.new_zeros((), dtype=torch.float32), [], []
        for j in range(self.config.num_heads):
            real = (column > j).float()
            first = (column - 1 - j).clamp_min(0)
            steps = torch.arange(j + 1, device=first.device)
            tokens = verified.next_tokens[row.unsqueeze(1), first.unsqueeze(1) + steps]
            guess = self._head(j, prefix[row, first], tokens)
            score = learn(self.output, guess, teacher, real, self.config, self._stack(j))
            loss = loss + self.config.head_decay**j * score.loss
            correct.append(score.correct)
            seen.append(real.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)


def _check(config: HydraConfig, target: Target) -> None:
    if config.num_heads < 1 or config.mlp_blocks < 1:
        raise ConfigError(f"Hydra wants a head and a block, got {config.num_heads} and {config.mlp_blocks}")
    if config.output_bias and not config.output_per_head:
        raise ConfigError("output_bias needs output_per_head: a borrowed output head has the target's bias or none")
    if not 0 <= config.hidden_state_offset <= target.num_layers:
        raise ConfigError(f"hidden_state_offset {config.hidden_state_offset} is not in 0..{target.num_layers}")


@dataclass(kw_only=True)
class HydraCrossConfig(AutoregressiveConfig):
    """Configuration of Hydra's cross-attention head."""


@register("hydra-cross")
class HydraCross(AutoregressiveHead):
    """Hydra's `cross-attn` variant: the newest token asks the features before it; its output is the next feature.

    `h = E + attention(query norm(E), keys and values norm(f))`, `g = h + mlp(norm(h))`, one norm for both.
    """

    config_class = HydraCrossConfig
    config: HydraCrossConfig

    def __init__(self, config: HydraCrossConfig, target: Target) -> None:
        super().__init__(config, target)
        fill_from_target(config, target, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        if config.num_layers != 1:
            raise ConfigError(f"a cross-attention head has one layer, got num_layers {config.num_layers}")
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attn = CrossAttention(layer_shape(config, config.hidden_size))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of deviation 0.02, norms at one."""
        draw_weights(self, generator)

    def _features(self, verified: Verified) -> Tensor:
        assert verified.hidden is not None
        return verified.hidden.to(self.input_layernorm.weight)

    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]
    ) -> Tensor:
        embedded = self.target.embed(tokens).detach().to(features)
        turn = self.rotary(positions)
        asked, read = self.input_layernorm(embedded), self.input_layernorm(features)
        x = embedded + self.cross_attn(asked, read, turn, mask, stores[0])
        return x + self.mlp(self.post_attention_layernorm(x))
