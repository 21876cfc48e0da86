"""What heads share that guess one token after another from their own last output: EAGLE and its kin.

Letters: B rows, T places, N tree nodes, k beams, D hidden size, W width of the head, Q draft vocabulary, P supervised
places. Place i pairs the target's feature of token i with the embedding of token i + 1. The head's output g there says
what token i + 2 may be, and stands in for the feature of token i + 1 where the target has not been yet. The pair's
position is i, the feature's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Sampling, Verified, last_of
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.layers import LayerShape, StepStore
from selfspec.heads.losses import TaughtConfig, denominator, learn, taught_places, teach_at
from selfspec.heads.trees import TreePlanner
from selfspec.target import Target
from selfspec.tree import DraftTree, Path

_ROOM = 512
_ANY_DEPTH = 1 << 30


@dataclass(kw_only=True)
class LayeredConfig(TaughtConfig):
    """Fields of heads with decoder layers that are asked anew at every node. Dimensions of 0 are taken from the target.

    Args:
        num_layers: decoder layers.
        intermediate_size: of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: size of one head; never derived from the other sizes once it is written here.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are scaled, as transformers' `rope_parameters` without the base: `rope_type` llama3,
            linear, yarn or longrope, and its numbers. None leaves them plain, whatever the target does.
        rms_norm_eps: of all norms.
        attention_bias: biases of the query, key and value projections.
        qk_norm: norms on queries and keys, head by head, as Qwen3 has them.
        choices: a static tree as paths of ranks, best first (Li et al. 2024, EAGLE): path `(c1, .., cm)` is the token
            of rank `cm` after the path before it. None grows a tree towards what the head holds likely (EAGLE-2).
        tree_nodes: nodes of a grown tree, the root included, unless the budget says otherwise.
        tree_depth: levels of a grown tree; fewer are made where deeper ones could not enter it any more.
        tree_top_k: beams of a grown tree, and children considered per beam.
    """

    num_layers: int = 1
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    qk_norm: bool = False
    choices: Sequence[Sequence[int]] | None = None
    tree_nodes: int = 10
    tree_depth: int = 4
    tree_top_k: int = 4


@dataclass(kw_only=True)
class AutoregressiveConfig(LayeredConfig):
    """Fields of heads that guess one token after another from their own output.

    Args:
        steps: passes of training; each after the first reads the guesses of the one before.
        step_decay: pass s counts `step_decay ** s` in the loss.
    """

    steps: int = 2
    step_decay: float = 0.8


@dataclass(eq=False)
class AutoregressiveState(DraftState):
    """One entry per committed pair in `cache`, the newest token `[B]`, and g of the newest pair `[B, W]`."""

    cache: SlotCache
    root: Tensor
    guess: Tensor

    def select(self, rows: Tensor) -> AutoregressiveState:
        """The state of some rows."""
        self.cache.select(rows.tolist())
        return AutoregressiveState(self.cache, self.root[rows], self.guess[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: AutoregressiveState) -> AutoregressiveState:
        """See `DraftState.join`."""
        self.cache.join(other.cache)
        root, guess = torch.cat([self.root, other.root]), torch.cat([self.guess, other.guess])
        return AutoregressiveState(self.cache, root, guess)


class AutoregressiveHead(DraftHead):
    """Reads pairs of features and tokens, drafts along its own guesses, and is trained on them.

    Subclasses build the layers and say what a feature is (`_features`), what a pass makes of pairs (`_run`), what the
    output head reads (`_readout`) and what the next pass gets in place of a feature (`_feedback`).
    """

    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig, target: Target) -> None:
        super().__init__(config, target)
        if config.steps < 1:
            raise ConfigError(f"the head wants at least one step of training, got steps {config.steps}")
        self._planner = TreePlanner(
            config.choices, config.tree_nodes, config.tree_depth, config.tree_top_k, _ANY_DEPTH, self.output.vocab.size
        )

    @property
    def choices(self) -> list[Path] | None:
        """The static tree as paths of ranks, best first; None where trees are grown."""
        return self._planner.choices

    @abstractmethod
    def _features(self, verified: Verified) -> Tensor:
        """The target's features as `_run` reads them, `[B, T, W]`, with gradient to what the head owns."""

    @abstractmethod
    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]
    ) -> Tensor:
        """g for pairs of features and next tokens, `[B, T, W]`.

        Args:
            features: `[B, T, W]`, of the target or the head's own.
            tokens: `[B, T]`.
            positions: `[B or 1, T]`.
            mask: `[B or 1, 1, T, S]` bool; None is causal.
            stores: one `KeyStore` per layer.
        """

    def _readout(self, guess: Tensor) -> Tensor:
        """What the output head reads of g."""
        return guess

    def _feedback(self, guess: Tensor) -> Tensor:
        """What the next pass reads in place of a feature."""
        return guess

    def _pass_loss(self, tokens: Tensor, guess: Tensor, taught: Tensor, real: Tensor) -> Tensor:
        """The loss of one pass, from that on tokens (scalar), g and the target's hidden state `[P, ..]`.

        `real` (`[P]` float32) says which places count.
        """
        return tokens

    # Decoding

    @torch.no_grad()
    def begin(self, verified: Verified) -> AutoregressiveState:
        """Read the prompt's pairs."""
        batch, places = verified.tokens.shape
        cache = SlotCache([None] * self.config.num_layers, batch, places + _ROOM, verified.tokens.device)
        return self._read(cache, verified)

    @torch.no_grad()
    def observe(self, state: AutoregressiveState, verified: Verified) -> AutoregressiveState:
        """Read the accepted pairs with the target's own features; guessed entries were dropped by `propose`."""
        return self._read(state.cache, verified)

    def _read(self, cache: SlotCache, verified: Verified) -> AutoregressiveState:
        positions = cache.slots.index(verified.tokens.shape[1])
        mask = causal_over_cache(cache, positions)
        guesses = self._run(self._features(verified), verified.next_tokens, positions, mask, cache.layers)
        cache.commit(verified.count_list)
        return AutoregressiveState(cache, verified.root, last_of(guesses, verified.counts))

    @torch.no_grad()
    def propose(
        self, state: AutoregressiveState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Grow a tree along the head's own guesses; its cache entries are dropped again at the end."""
        tree = self._planner.start(state.root, budget)
        if tree is None:
            return DraftTree.root_only(state.root)
        beam = _Beam(state.cache, state.root.shape[0])
        guess = state.guess.unsqueeze(1)
        columns, origin = tree.grow(self.output(self._readout(guess)))
        while not tree.done:
            features = self._feedback(guess).gather(1, origin.unsqueeze(-1).expand(-1, -1, guess.shape[-1]))
            tokens = self.output.vocab.to_target(columns)
            guess = self._run(features, tokens, *beam.step(origin), state.cache.layers)
            columns, origin = tree.grow(self.output(self._readout(guess)))
        beam.drop()
        columns, shape = tree.finish()
        return DraftTree(torch.cat([state.root.unsqueeze(1), self.output.vocab.to_target(columns)], 1), shape)

    # Training

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The configured loss against the target's distribution, over `steps` passes.

        The teacher at place i is the target at place i + 1 given a token of the draft vocabulary. `correct` counts
        where the first choice is the teacher's first choice.
        """
        assert verified.hidden is not None
        row, column = taught_places(verified, mask)
        taught = verified.hidden[row, column]
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        loss, correct, seen = taught.new_zeros((), dtype=torch.float32), [], []
        for step, guesses in enumerate(self._passes(verified)):
            guess = guesses[row, column - 1]
            real = (column > step).float()
            score = learn(self.output, self._readout(guess), teacher, real, self.config)
            loss = loss + self.config.step_decay**step * self._pass_loss(score.loss, guess, taught, real)
            correct.append(score.correct)
            seen.append(real.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)

    def _passes(self, verified: Verified) -> Iterator[Tensor]:
        """g of every place, pass by pass (Zhang et al. 2024, HASS; Li et al. 2025, EAGLE-3, section 3.2).

        Pass s at place i reads the guess of pass s - 1 at place i - 1 in place of the feature, and attends to the
        true pairs up to i - s and to its own chain of guesses: what decoding does s levels below the root.
        """
        truth = features = self._features(verified)
        places, device = truth.shape[1], truth.device
        stores = [StepStore() for _ in range(self.config.num_layers)]
        positions = torch.arange(places, device=device).unsqueeze(0)
        for step in range(self.config.steps):
            look = unrolled_mask(places, step, device) if step else None
            guesses = self._run(features, verified.next_tokens, positions, look, stores)
            yield guesses
            features = torch.cat([truth[:, :1], self._feedback(guesses)[:, :-1]], 1)


class _Beam:
    """Where the beam's nodes stand in the head's cache while a tree grows, and what each may look at."""

    def __init__(self, cache: SlotCache, batch: int) -> None:
        self.slots = cache.slots
        self.committed = self.slots.lengths_tensor().unsqueeze(1)
        self.ancestors = torch.zeros(batch, 1, 0, dtype=torch.bool, device=self.committed.device)
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
        if self.slots.uniform:
            prefix = self.slots.lengths[0] - self.written
            return torch.nn.functional.pad(self.ancestors, (prefix, 0), value=True).unsqueeze(1)
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


def causal_over_cache(cache: SlotCache, positions: Tensor) -> Tensor | None:
    """What places read into a cache may look at, `[B, 1, T, S]` bool; None (plainly causal) while it is empty."""
    if max(cache.lengths) == 0:
        return None
    _, end = cache.slots.view(None, positions.shape[1])
    return (torch.arange(end, device=positions.device) <= positions.unsqueeze(-1)).unsqueeze(1)


def unrolled_mask(places: int, step: int, device: torch.device) -> Tensor:
    """What the places of pass `step` see of all passes so far, `[1, 1, T, (step + 1) * T]` bool.

    Place i sees the true pairs 0..i - step of pass 0, and of pass r > 0 the one place i - step + r on its own chain.
    """
    line = torch.arange(places, device=device)
    behind = line.unsqueeze(1) - line - step
    passes = [behind >= 0, *(behind == -r for r in range(1, step + 1))]
    return torch.cat(passes, 1)[None, None]


def fill_from_target(config: LayeredConfig, target: Target, width: int) -> None:
    """Write the target's dimensions where the configuration has none, and refuse what cannot be.

    Args:
        config: changed in place.
        target: the base model.
        width: W; where it is not the target's hidden size, `head_dim` and the MLP are made after it.

    Raises:
        ConfigError: dimensions, steps or trees that make no sense; the message names the value.
    """
    base, same = target.config, width == target.hidden_size
    config.num_attention_heads = config.num_attention_heads or base.num_attention_heads
    config.num_key_value_heads = config.num_key_value_heads or (
        getattr(base, "num_key_value_heads", None) or config.num_attention_heads
    )
    own_size = getattr(base, "head_dim", None) if same else None
    config.head_dim = config.head_dim or own_size or width // config.num_attention_heads
    inner = getattr(base, "intermediate_size", None) if same else None
    config.intermediate_size = config.intermediate_size or inner or 4 * width
    _check(config)


def _check(config: LayeredConfig) -> None:
    if config.num_layers < 1:
        raise ConfigError(f"the head wants at least one layer, got num_layers {config.num_layers}")
    if config.head_dim % 2 or config.head_dim < 2:
        raise ConfigError(f"head_dim {config.head_dim} is odd or too small; rotary positions need pairs")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} key-value heads"
        )


def layer_shape(config: LayeredConfig, width: int, input_norm: bool = True, attention_size: int = 0) -> LayerShape:
    """The shape of one of the head's layers; `attention_size` is what the projections read, 0 for `width`."""
    return LayerShape(
        hidden_size=width,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        input_norm=input_norm,
        attention_size=attention_size,
    )
