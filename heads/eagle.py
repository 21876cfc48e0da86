"""EAGLE-1 heads with EAGLE-2 trees: guess the target's next feature, then the next token from it.

Li et al. 2024, "EAGLE" (sections 3.1 and 3.2) and "EAGLE-2" (section 4); training on the head's own guesses as in
Zhang et al. 2024 (HASS) and Li et al. 2025 (EAGLE-3, section 3.2).

Letters: B rows, T places, N tree nodes, k beams, D hidden size, Q draft vocabulary, P supervised places.
Place i pairs the target's feature of token i with the embedding of token i + 1. Its output g approximates the feature
of token i + 1, and so says what token i + 2 may be. Its position is i, the feature's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified, last_of
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.layers import DecoderLayer, LayerShape, RMSNorm, StepStore, rotary
from selfspec.heads.losses import TaughtConfig, denominator, feature_distance, learn, taught_places, teach
from selfspec.heads.trees import CandidatePool
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree

_ROOM = 512


@dataclass(kw_only=True)
class EagleConfig(TaughtConfig):
    """Configuration of an EAGLE head. Dimensions of 0 are taken from the target.

    Published EAGLE-1 heads have `input_norms`, `layer_norm` and `output_norm` false.

    Args:
        num_layers: decoder layers.
        intermediate_size: of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of one head; never derived from the other sizes once it is written here.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: of all norms.
        attention_bias: biases of the query, key and value projections.
        fc_bias: bias of the projection that joins embedding and feature.
        input_norms: norms on the embedding and on the feature before they are joined.
        layer_norm: a norm before attention in the first layer (later layers always have one).
        output_norm: a norm at the end, so that g has the scale of the target's normed feature.
        tree_nodes: nodes of a tree, the root included, unless the budget says otherwise.
        tree_depth: levels of guesses; fewer are made where deeper ones could not enter the tree any more.
        tree_top_k: beams, and children considered per beam.
        steps: passes of training; each after the first reads the guesses of the one before.
        step_decay: pass s counts `step_decay ** s` in the loss.
        token_weight: weight of the loss on tokens.
        feature_weight: weight of the distance between features.
    """

    num_layers: int = 1
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    fc_bias: bool = False
    input_norms: bool = True
    layer_norm: bool = True
    output_norm: bool = True
    tree_nodes: int = 10
    tree_depth: int = 4
    tree_top_k: int = 4
    steps: int = 2
    step_decay: float = 0.8
    token_weight: float = 1.0
    feature_weight: float = 0.1


@dataclass(eq=False)
class EagleState(DraftState):
    """One entry per committed pair in `cache`, the newest token `[B]`, and g of the newest pair `[B, D]`."""

    cache: SlotCache
    root: Tensor
    guess: Tensor

    def select(self, rows: Tensor) -> EagleState:
        """The state of some rows."""
        self.cache.select(rows.tolist())
        return EagleState(self.cache, self.root[rows], self.guess[rows])


@register("eagle")
class Eagle(DraftHead):
    """`fc([embedding; feature])`, one decoder layer, and the target's output head on the draft vocabulary."""

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Target) -> None:
        super().__init__(config, target)
        _fill_from_target(config, target)
        _check(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm(size, eps) if config.input_norms else nn.Identity()
        self.feature_norm = RMSNorm(size, eps) if config.input_norms else nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(_layer_shape(config, input_norm=config.layer_norm or index > 0))
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps) if config.output_norm else nn.Identity()

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Start near "the next feature is like this one", with every channel at the size it has in the target.

        Normal weights of deviation 0.02; the feature passes through `fc` unchanged, and what the layers add to it is
        small. The norms undo and restore the sizes of the target's channels.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 1:
                nn.init.ones_(parameter)
            elif not name.startswith("output."):
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.002 if small else 0.02, generator=generator)
        with torch.no_grad():
            self.fc.weight[:, self.config.hidden_size :].diagonal().add_(1)
            scale = self.target.hidden_scale(generator).to(self.fc.weight.device)
            scale = scale.clamp_min(1e-3 * float(scale.mean()))
            if isinstance(self.feature_norm, RMSNorm):
                self.feature_norm.weight.copy_(scale.pow(2).mean().sqrt() / scale)
            if isinstance(self.norm, RMSNorm):
                self.norm.weight.copy_(scale)

    def _join(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Features `[B, T, D]` and the tokens after them `[B, T]` to the layers' input `[B, T, D]`."""
        features = features.to(self.fc.weight)  # the last layer of a spread-out target may be on another device
        embedded = self.target.embed(tokens).detach().to(features)
        return self.fc(torch.cat([self.embedding_norm(embedded), self.feature_norm(features)], -1))

    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: list[Any]
    ) -> Tensor:
        """g for pairs of features and next tokens, `[B, T, D]`.

        Args:
            features: `[B, T, D]`, the target's or the head's own guesses.
            tokens: `[B, T]`.
            positions: `[B or 1, T]`.
            mask: `[B or 1, 1, T, S]` bool; None is causal.
            stores: one `KeyStore` per layer.
        """
        x = self._join(features, tokens)
        turn = rotary(positions, self.config.head_dim, self.config.rope_theta)
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, turn, mask, store)
        return self.norm(x)

    # Decoding

    @torch.no_grad()
    def begin(self, verified: Verified) -> EagleState:
        """Read the prompt's pairs."""
        batch, places = verified.tokens.shape
        capacity = places + _ROOM
        cache = SlotCache([None] * self.config.num_layers, batch, capacity, verified.tokens.device)
        return self._read(cache, verified)

    @torch.no_grad()
    def observe(self, state: EagleState, verified: Verified) -> EagleState:
        """Read the accepted pairs with the target's own features; guessed entries were dropped by `propose`."""
        return self._read(state.cache, verified)

    def _read(self, cache: SlotCache, verified: Verified) -> EagleState:
        assert verified.hidden is not None
        positions = cache.slots.index(verified.tokens.shape[1])
        mask = None
        if max(cache.lengths) > 0:
            _, end = cache.slots.view(None, positions.shape[1])
            mask = (torch.arange(end, device=positions.device) <= positions.unsqueeze(-1)).unsqueeze(1)
        guesses = self._run(verified.hidden, verified.next_tokens, positions, mask, cache.layers)
        cache.commit(verified.counts.tolist())
        return EagleState(cache, verified.root, last_of(guesses, verified.counts))

    @torch.no_grad()
    def propose(
        self, state: EagleState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Grow a tree along the head's own guesses; its cache entries are dropped again at the end."""
        guesses = (self.config.tree_nodes if budget.nodes is None else budget.nodes) - 1
        levels = min(self.config.tree_depth, budget.depth, guesses)
        if levels < 1:
            return DraftTree.root_only(state.root)
        pool = CandidatePool(state.root.shape[0], self.config.tree_top_k, state.root.device)
        beam = _Beam(state)
        features = state.guess.unsqueeze(1)
        columns, origin = pool.grow(self.output(features))
        for _ in range(levels - 1):
            if pool.settled(guesses):
                break
            features = features.gather(1, origin.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
            positions, mask = beam.step(origin)
            features = self._run(features, self.output.vocab.to_target(columns), positions, mask, state.cache.layers)
            columns, origin = pool.grow(self.output(features))
        beam.drop()
        columns, shape = pool.best(guesses)
        return DraftTree(torch.cat([state.root.unsqueeze(1), self.output.vocab.to_target(columns)], 1), shape)

    # Training

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """Cross entropy with the target's distribution plus distance to its features, over `steps` passes.

        Pass s at place i reads the guess of pass s - 1 at place i - 1 in place of the true feature, and attends to the
        true pairs up to i - s and to its own chain of guesses: what decoding does s levels below the root. The
        teacher at place i is the target at place i + 1 given a token of the draft vocabulary. `correct` counts where
        the first choice is the teacher's first choice.
        """
        assert verified.hidden is not None
        truth = verified.hidden.to(self.fc.weight.dtype)
        row, column = taught_places(verified, mask)
        taught = truth[row, column]
        teacher = teach(self.output, taught, self.config.teacher_top_k)
        stores = [StepStore() for _ in self.layers]
        positions = torch.arange(truth.shape[1], device=truth.device).unsqueeze(0)
        features, config = truth, self.config
        loss, correct, seen = truth.new_zeros((), dtype=torch.float32), [], []
        for step in range(config.steps):
            look = unrolled_mask(truth.shape[1], step, truth.device) if step else None
            guesses = self._run(features, verified.next_tokens, positions, look, stores)
            guess = guesses[row, column - 1]
            real = (column > step).float()
            score = learn(self.output, guess, teacher, real, config)
            total = config.token_weight * score.loss
            if config.feature_weight:
                total = total + config.feature_weight * (real * feature_distance(guess, taught)).sum()
            loss = loss + config.step_decay**step * total
            correct.append(score.correct)
            seen.append(real.sum())
            features = torch.cat([truth[:, :1], guesses[:, :-1]], 1)
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)


class _Beam:
    """Where the beam's nodes stand in the head's cache while a tree grows, and what each may look at."""

    def __init__(self, state: EagleState) -> None:
        self.slots = state.cache.slots
        self.committed = self.slots.lengths_tensor().unsqueeze(1)
        self.ancestors = torch.zeros(*state.guess.shape[:1], 1, 0, dtype=torch.bool, device=state.guess.device)
        self.level = 0
        self.written = 0

    def step(self, origin: Tensor) -> tuple[Tensor, Tensor]:
        """Go one level down.

        Args:
            origin: `[B, k]`, the slot of each node's parent in the beam before.

        Returns:
            Positions `[B, k]` and the mask `[B, 1, k, S]` of the new beam.
        """
        batch, width = origin.shape
        self._advance(self.ancestors.shape[-1] - self.written)
        itself = torch.eye(width, dtype=torch.bool, device=origin.device).expand(batch, -1, -1)
        inherited = self.ancestors.gather(1, origin.unsqueeze(-1).expand(-1, -1, self.ancestors.shape[-1]))
        self.ancestors = torch.cat([inherited, itself], -1)
        positions = (self.committed + self.level).expand(-1, width)
        self.level += 1
        return positions, self._mask()

    def _mask(self) -> Tensor:
        batch, width, drafted = self.ancestors.shape
        _, end = self.slots.view(None, width)
        places = torch.arange(end, device=self.committed.device)
        seen = (places < self.committed).unsqueeze(1).expand(-1, width, -1)
        index = self.committed + torch.arange(drafted, device=places.device)
        return seen.scatter(2, index.unsqueeze(1).expand(-1, width, -1), self.ancestors).unsqueeze(1)

    def _advance(self, count: int) -> None:
        self.slots.advance([count] * len(self.slots.lengths))
        self.written += count

    def drop(self) -> None:
        """Forget everything written since the tree began."""
        self._advance(-self.written)


def unrolled_mask(places: int, step: int, device: torch.device) -> Tensor:
    """What the places of pass `step` see of all passes so far, `[1, 1, T, (step + 1) * T]` bool.

    Place i sees the true pairs 0..i - step of pass 0, and of pass r > 0 the one place i - step + r on its own chain.
    """
    line = torch.arange(places, device=device)
    behind = line.unsqueeze(1) - line - step
    passes = [behind >= 0, *(behind == -r for r in range(1, step + 1))]
    return torch.cat(passes, 1)[None, None]


def _fill_from_target(config: EagleConfig, target: Target) -> None:
    base = target.config
    config.num_attention_heads = config.num_attention_heads or base.num_attention_heads
    config.num_key_value_heads = config.num_key_value_heads or (
        getattr(base, "num_key_value_heads", None) or config.num_attention_heads
    )
    config.head_dim = config.head_dim or (
        getattr(base, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    config.intermediate_size = config.intermediate_size or (
        getattr(base, "intermediate_size", None) or 4 * config.hidden_size
    )


def _check(config: EagleConfig) -> None:
    if config.num_layers < 1 or config.steps < 1:
        raise ConfigError(f"EAGLE wants a layer and a training step, got {config.num_layers} and {config.steps}")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim {config.head_dim} is odd; rotary positions need pairs")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} key-value heads"
        )
    if config.tree_top_k < 1 or config.tree_nodes < 1 or config.tree_depth < 0:
        raise ConfigError(
            f"a tree of {config.tree_nodes} nodes, depth {config.tree_depth} and {config.tree_top_k} beams is no tree"
        )


def _layer_shape(config: EagleConfig, input_norm: bool) -> LayerShape:
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        input_norm=input_norm,
    )
