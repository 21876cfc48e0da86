"""Kangaroo: a small trained adapter after the target's first E layers drafts through the target's own output head.

Liu et al. 2024, "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting". The adapter is "one multi-head
attention and two normalization layers" (section 3.2), without an MLP. With f_i the target's hidden state of token i
after E layers:

    x_i = f_i + attention(norm(f))_i,    logits for token i + 1 = output(norm(x_i))

The first exit is that after E layers; drafted tokens' work below it is kept for verification (`Computed`). The second
exit (section 3.3) ends drafting where the adapter's confidence falls below a threshold. It looks at the distribution
before a token is chosen or drawn and never drops a node afterwards, so drawn nodes stay exact. The threshold is fixed,
as in the paper (0.6), unless `adaptive` is set.

Training repeats decoding: f below the exit is the target's own in both, and the adapter attends causally to all of it.

Letters: B rows, T places, D hidden size, E exit layer, n new nodes, W nodes written before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.autoregressive import LayeredConfig, causal_over_cache, fill_from_target, layer_shape
from selfspec.heads.layers import Attention, RMSNorm
from selfspec.heads.losses import denominator, learn, taught_places, teach_at
from selfspec.heads.rotary import Rotary
from selfspec.heads.trunk import HeadOutput, Trunk
from selfspec.registry import register
from selfspec.switches import Plan
from selfspec.target import Target
from selfspec.tree import Computed, DraftTree, TreeShape

_ROOM = 512


@dataclass(kw_only=True)
class KangarooConfig(LayeredConfig):
    """Configuration of a Kangaroo head. `num_layers` is 1 and there is no MLP, grown or static tree.

    Args:
        exit_layer: E; 0 takes a sixteenth of the layers, at least 2 where the target has more than that (the paper has
            2 of 32 and 3 of 40).
        depth: the most levels of a round (the paper's gamma is 6).
        top_k: children proposed per level; the first of them goes on.
        nodes: nodes of a tree, the root included, unless the budget says otherwise.
        threshold: the confidence below which drafting stops; 0 never stops.
        draws: when the target samples, draw nodes from the draft's distribution instead of taking the likeliest.
        share: verification does not repeat the E layers for drafted tokens.
    """

    exit_layer: int = 0
    depth: int = 6
    top_k: int = 2
    nodes: int = 8
    threshold: float = 0.6
    draws: bool = False
    share: bool = True


@dataclass(eq=False)
class KangarooState(DraftState):
    """The target's cache, the adapter's own (one entry per committed token), and the newest token `[B]`."""

    cache: SlotCache
    own: SlotCache
    root: Tensor

    def select(self, rows: Tensor) -> KangarooState:
        """The state of some rows; the engine takes care of the target's cache."""
        self.own.select(rows.tolist())
        self.root = self.root[rows]
        return self


@register("kangaroo")
class Kangaroo(DraftHead):
    """One attention and two norms between the target's layer E and its output head.

    Raises:
        UnsupportedModel: the target cannot run its first layers alone; the message says why.
    """

    config_class = KangarooConfig
    config: KangarooConfig

    def __init__(self, config: KangarooConfig, target: Target) -> None:
        super().__init__(config, target)
        config.exit_layer = config.exit_layer or min(max(2, round(target.num_layers / 16)), target.num_layers - 1)
        fill_from_target(config, target, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        if min(config.depth, config.top_k, config.nodes) < 1 or not 0 <= config.threshold <= 1:
            raise ConfigError(
                f"depth {config.depth}, top_k {config.top_k} and nodes {config.nodes} must be at least 1, and the "
                f"threshold {config.threshold} lies in 0..1"
            )
        if config.num_layers != 1 or config.choices is not None:
            raise ConfigError("a Kangaroo adapter is one attention layer and follows a trunk; leave out the rest")
        self._plan: Plan = target.passes.check(Plan(stop=config.exit_layer))
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(layer_shape(config, config.hidden_size))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def needs(self) -> Needs:
        """The hidden state after E layers, the last one (the teacher of training), and the target's cache."""
        return Needs(hidden=True, layers=(self.config.exit_layer,), cache=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Attention adds nothing at first; the last norm gives channels the scale that the output head reads."""
        for layer in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj):
            torch.nn.init.normal_(layer.weight, std=0.02, generator=generator)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
        torch.nn.init.zeros_(self.attention.o_proj.weight)
        torch.nn.init.ones_(self.input_norm.weight)
        with torch.no_grad():
            self.norm.weight.copy_(self.target.hidden_scale(generator))

    def _run(self, features: Tensor, positions: Tensor, mask: Tensor | None, store: Any) -> Tensor:
        """`[B, T, D]` features to what the output head reads, `[B, T, D]`."""
        turn = self.rotary(positions)
        features = features.to(self.norm.weight.dtype)
        return self.norm(features + self.attention(self.input_norm(features), turn, mask, store))

    # Decoding

    @torch.no_grad()
    def begin(self, verified: Verified) -> KangarooState:
        """Read the prompt's features."""
        batch, places = verified.tokens.shape
        own = SlotCache([None], batch, places + _ROOM, verified.tokens.device)
        return self._read(own, verified)

    @torch.no_grad()
    def observe(self, state: KangarooState, verified: Verified) -> KangarooState:
        """Read the features of the accepted tokens."""
        return self._read(state.own, verified)

    def _read(self, own: SlotCache, verified: Verified) -> KangarooState:
        assert verified.cache is not None
        positions = own.slots.index(verified.tokens.shape[1])
        self._run(verified.layers[0], positions, causal_over_cache(own, positions), own.layers[0])
        own.commit(verified.counts.tolist())
        return KangarooState(verified.cache, own, verified.root)

    @torch.no_grad()
    def propose(
        self, state: KangarooState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A trunk through layers 0..E - 1 and the adapter, with branches."""
        guesses = budget.guesses(self.config.nodes)
        levels = min(self.config.depth, budget.depth, guesses)
        if levels < 1:
            return DraftTree.root_only(state.root)
        draws = self.config.draws and sampling.do_sample
        children = max(1, min(self.config.top_k, guesses // levels if draws else guesses))
        trunk = Trunk(state.root, children, sampling if draws else None, generator)
        threshold = torch.full(state.root.shape, self.config.threshold, device=state.root.device)
        output, exits, tokens = HeadOutput(self.target, self.output), [], state.root.unsqueeze(1)
        for level in range(levels):
            shape = TreeShape.chain(level, tokens.device)
            _, exit_hidden = self.target.passes.run(shape, tokens, state.cache, self._plan)
            assert exit_hidden is not None
            exits.append(exit_hidden)
            columns = trunk.add(output(self._step(state.own, exit_hidden, level))[:, 0], threshold)
            tokens = output.to_target(columns[:, :1])
            if not trunk.goes_on():
                break
        computed = Computed(self.config.exit_layer, torch.cat(exits, 1)) if self.config.share else None
        return trunk.tree(guesses, output, computed)

    def _step(self, own: SlotCache, feature: Tensor, level: int) -> Tensor:
        """What follows the trunk's node at this level, `[B, 1, D]`; the own cache is left as it was, but for room."""
        with own.drafting(level):
            positions = own.slots.index(1)
            _, end = own.slots.view(None, 1)
            seen = (torch.arange(end, device=positions.device) <= positions.unsqueeze(-1)).unsqueeze(1)
            return self._run(feature, positions, seen, own.layers[0])

    # Training

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The configured loss against the target's distribution at the same place."""
        assert verified.hidden is not None
        row, column = taught_places(verified, mask)
        positions = torch.arange(verified.tokens.shape[1], device=mask.device).unsqueeze(0)
        guess = self._run(verified.layers[0], positions, None, None)[row, column]
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        real = torch.ones(row.shape, device=row.device)
        score = learn(self.output, guess, teacher, real, self.config)
        count = real.sum().unsqueeze(0)
        return HeadLoss(score.loss / denominator(count[0], items), score.correct.unsqueeze(0), count)
