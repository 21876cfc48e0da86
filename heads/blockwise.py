"""Blockwise parallel decoding (Stern et al. 2018): heads guess positions 2..k at once, the model checks them.

p_1 is the model itself, frozen (section 6.1); the heads for the positions after it are one feed-forward layer on the
last hidden state, as wide as all heads together, whose outputs are added to that state and go through the model's own
output head (section 6). The guesses form a chain. Greedy decoding accepts its longest prefix that the model would have
written (section 3, "verify" and "accept"); sampled text follows the target as with any chosen nodes.

Letters: B rows, T places, K heads (k - 1 in the paper), D hidden size, Q draft vocabulary, P supervised places.
Head j (from 0) at place i, which holds token i, guesses token i + 2 + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified, last_of
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.losses import TaughtConfig, denominator, learn, taught_places, teach_at
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape


@dataclass(kw_only=True)
class BlockwiseConfig(TaughtConfig):
    """Configuration of blockwise heads.

    Args:
        num_heads: K; blocks have K + 1 tokens, the model's own included.
        inner_size: width of the feed-forward layer per head; 0 takes D.
    """

    num_heads: int = 4
    inner_size: int = 0


@dataclass(frozen=True, eq=False)
class BlockwiseState(DraftState):
    """The newest hidden state of each row `[B, D]`, and the token after it `[B]`."""

    hidden: Tensor
    root: Tensor

    def select(self, rows: Tensor) -> BlockwiseState:
        """The state of some rows."""
        return BlockwiseState(self.hidden[rows], self.root[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: BlockwiseState) -> BlockwiseState:
        """See `DraftState.join`."""
        return BlockwiseState(torch.cat([self.hidden, other.hidden]), torch.cat([self.root, other.root]))


@register("blockwise")
class Blockwise(DraftHead):
    """`h + W_j relu(W h + b) + b_j` for head j, then the target's output head on the draft vocabulary."""

    config_class = BlockwiseConfig
    config: BlockwiseConfig

    def __init__(self, config: BlockwiseConfig, target: Target) -> None:
        super().__init__(config, target)
        if config.num_heads < 1 or config.inner_size < 0:
            raise ConfigError(
                f"blockwise wants a head and a width, got {config.num_heads} and {config.inner_size}; 0 is the target's"
            )
        config.inner_size = config.inner_size or config.hidden_size
        self.inner = nn.Linear(config.hidden_size, config.num_heads * config.inner_size)
        self.outer = nn.Linear(config.num_heads * config.inner_size, config.num_heads * config.hidden_size)

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """At first every head repeats the target's own next token: the residual path alone, with features to learn."""
        scale = self.target.hidden_scale(generator).to(self.inner.weight.device)
        nn.init.normal_(self.inner.weight, std=self.config.hidden_size**-0.5, generator=generator)
        with torch.no_grad():
            self.inner.weight.div_(scale.clamp_min(1e-3 * float(scale.mean())))
        for parameter in (self.inner.bias, self.outer.weight, self.outer.bias):
            nn.init.zeros_(parameter)

    def _heads(self, hidden: Tensor) -> Tensor:
        """`[P, D]` to `[K, P, D]`."""
        moved = self.outer(F.relu(self.inner(hidden))).unflatten(-1, (self.config.num_heads, -1))
        return (hidden.unsqueeze(-2) + moved).transpose(0, 1)

    def begin(self, verified: Verified) -> BlockwiseState:
        """Remember the prompt's last hidden state."""
        assert verified.hidden is not None
        return BlockwiseState(last_of(verified.hidden, verified.counts), verified.root)

    def observe(self, state: BlockwiseState, verified: Verified) -> BlockwiseState:
        """Remember the newest hidden state; nothing older matters."""
        return self.begin(verified)

    @torch.no_grad()
    def propose(
        self, state: BlockwiseState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """The heads' first choices in a line."""
        room = self.config.num_heads if budget.nodes is None else budget.nodes - 1
        length = max(0, min(self.config.num_heads, room, budget.depth))
        if length == 0:
            return DraftTree.root_only(state.root)
        moved = self._heads(state.hidden.to(self.inner.weight))[:length]
        guesses = self.output.vocab.to_target(self.output(moved).argmax(-1)).t().to(state.root.device)
        shape = TreeShape.chain(length, state.root.device)
        return DraftTree(torch.cat([state.root.unsqueeze(1), guesses], 1), shape)

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The sum over heads of the configured loss against the target's distribution.

        The paper draws one head per batch to save memory, which has the same expectation up to the factor K (section
        6). The teacher of head j at place i is the target at place i + 1 + j, from the same features.
        """
        assert verified.hidden is not None
        hidden = verified.hidden.to(self.inner.weight.dtype)
        row, column = taught_places(verified, mask)
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        moved = self._heads(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        loss, correct, seen = hidden.new_zeros((), dtype=torch.float32), [], []
        for j in range(self.config.num_heads):
            real = (column > j).float()
            score = learn(self.output, moved[j, row, (column - 1 - j).clamp_min(0)], teacher, real, self.config, None)
            loss = loss + score.loss
            correct.append(score.correct)
            seen.append(real.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)
