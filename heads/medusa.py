"""Medusa-1: independent heads on the last hidden state, all guesses in one pass (Cai et al. 2024, section 2.1).

Letters: B rows, T places, N tree nodes, M heads, D hidden size, Q draft vocabulary, P supervised places.
Head j (from 0) at place i, which holds token i, guesses token i + 2 + j; the target itself gives token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified, last_of
from selfspec.draft_output import DraftOutput
from selfspec.errors import ConfigError
from selfspec.head import DraftHead, HeadLoss
from selfspec.heads.best_first import likeliest_tree
from selfspec.heads.layers import ResidualBlocks
from selfspec.heads.losses import TaughtConfig, denominator, learn, taught_places, teach_at
from selfspec.heads.trees import check_choices, cut_choices, default_choices
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, Path, TreeShape, shape_from_choices

STATIC, BEST_FIRST = "static", "best-first"


@dataclass(kw_only=True)
class MedusaConfig(TaughtConfig):
    """Configuration of Medusa heads.

    Args:
        num_heads: M.
        num_layers: residual blocks per head.
        tree: `static`, the same paths of ranks in every round, or `best-first`, each round the tree that the heads'
            own probabilities say is the likeliest of its size (see `best_first`).
        choices: the static tree as paths of ranks, best first; None takes a default for the number of heads. Path
            `(c1, .., cm)` is the token of rank `cm` of head m - 1. An empty list drafts nothing.
        tree_nodes: nodes of a best-first tree, the root included, unless the budget says otherwise.
        tree_top_k: tokens of each head that a best-first tree considers.
        head_decay: head j counts `head_decay ** j` in the loss (section 2.2.1).
        output_per_head: an output matrix of its own for each head (M * Q * D weights), as published heads have.
    """

    num_heads: int = 4
    num_layers: int = 1
    tree: str = STATIC
    choices: Sequence[Sequence[int]] | None = None
    tree_nodes: int = 12
    tree_top_k: int = 4
    head_decay: float = 0.8
    output_per_head: bool = False


@dataclass(frozen=True, eq=False)
class MedusaState(DraftState):
    """The newest hidden state of each row `[B, D]`, and the token after it `[B]`."""

    hidden: Tensor
    root: Tensor

    def select(self, rows: Tensor) -> MedusaState:
        """The state of some rows."""
        return MedusaState(self.hidden[rows], self.root[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: MedusaState) -> MedusaState:
        """See `DraftState.join`."""
        return MedusaState(torch.cat([self.hidden, other.hidden]), torch.cat([self.root, other.root]))


@dataclass(frozen=True, eq=False)
class _Layout:
    """A static tree and where its tokens stand in the heads' rankings (`[N - 1]` int64 into `[M * ranks]`)."""

    shape: TreeShape
    ranks: int
    places: Tensor


@register("medusa")
class Medusa(DraftHead):
    """M stacks of residual blocks; their outputs go through one output head over the draft vocabulary, or one each."""

    config_class = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        super().__init__(config, target)
        if config.num_heads < 1 or config.num_layers < 1:
            raise ConfigError(f"Medusa wants a head and a layer, got {config.num_heads} and {config.num_layers}")
        if config.output_per_head:
            self.output = DraftOutput(target, config.draft_vocab_size, own=True, stacks=config.num_heads)
        self.blocks = ResidualBlocks(config.num_heads, config.num_layers, config.hidden_size)
        self.choices = _choices_of(config, self.output.vocab.size)
        self._layouts: dict[tuple[int, int, torch.device], _Layout] = {}

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Zero blocks: at first every head repeats the target's own next token."""
        for parameter in self.blocks.parameters():
            torch.nn.init.zeros_(parameter)

    def begin(self, verified: Verified) -> MedusaState:
        """Remember the prompt's last hidden state."""
        assert verified.hidden is not None
        return MedusaState(last_of(verified.hidden, verified.counts), verified.root)

    def observe(self, state: MedusaState, verified: Verified) -> MedusaState:
        """Remember the newest hidden state; nothing older matters."""
        return self.begin(verified)

    @torch.no_grad()
    def propose(
        self, state: MedusaState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """The static tree, filled from each head's ranking, or the likeliest one."""
        if self.config.tree == BEST_FIRST:
            return self._likeliest(state, budget)
        layout = self._layout(budget, state.root.device)
        if layout.shape.nodes == 1:
            return DraftTree.root_only(state.root)
        logits = self.output(self.blocks(state.hidden.to(self.blocks.weight)))
        ranked = logits.topk(layout.ranks).indices.transpose(0, 1).flatten(1)
        guesses = self.output.vocab.to_target(ranked[:, layout.places])
        return DraftTree(torch.cat([state.root.unsqueeze(1), guesses], 1), layout.shape)

    def _likeliest(self, state: MedusaState, budget: Budget) -> DraftTree:
        guesses = budget.guesses(self.config.tree_nodes)
        depth = min(self.config.num_heads, budget.depth, guesses)
        if depth < 1:
            return DraftTree.root_only(state.root)
        logits = self.output(self.blocks(state.hidden.to(self.blocks.weight)))[:depth].transpose(0, 1)
        return likeliest_tree(state.root, logits, self.output.vocab, self.config.tree_top_k, guesses)

    def _layout(self, budget: Budget, device: torch.device) -> _Layout:
        nodes = len(self.choices) if budget.nodes is None else max(0, min(budget.nodes - 1, len(self.choices)))
        key = (nodes, min(budget.depth, self.config.num_heads), device)
        if key not in self._layouts:
            shape, paths = shape_from_choices(cut_choices(self.choices, nodes, key[1]))
            ranks = 1 + max((path[-1] for path in paths[1:]), default=0)
            places = torch.tensor([(len(path) - 1) * ranks + path[-1] for path in paths[1:]], dtype=torch.long)
            self._layouts[key] = _Layout(TreeShape(shape.parents.to(device)), ranks, places.to(device))
        return self._layouts[key]

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """Sum over heads of `head_decay ** j` times the configured loss against the target's distribution.

        The teacher of head j at place i is the target at place i + 1 + j, from the same features, given a token of
        the draft vocabulary. `correct` counts where a head's first choice is the teacher's first choice.
        """
        assert verified.hidden is not None
        hidden = verified.hidden.to(self.blocks.weight.dtype)
        row, column = taught_places(verified, mask)
        teacher = teach_at(self.output, verified, row, column, self.config.teacher_top_k)
        moved = self.blocks(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        loss, correct, seen = hidden.new_zeros((), dtype=torch.float32), [], []
        for j in range(self.config.num_heads):
            real = (column > j).float()
            stack = j if self.config.output_per_head else None
            guess = moved[j, row, (column - 1 - j).clamp_min(0)]
            score = learn(self.output, guess, teacher, real, self.config, stack)
            loss = loss + self.config.head_decay**j * score.loss
            correct.append(score.correct)
            seen.append(real.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)


def _choices_of(config: MedusaConfig, draft_tokens: int) -> list[Path]:
    """The static tree; empty where trees are grown. Raises ConfigError for a config that contradicts itself."""
    if config.tree not in (STATIC, BEST_FIRST) or min(config.tree_nodes, config.tree_top_k) < 1:
        raise ConfigError(
            f"tree is {config.tree!r} of {config.tree_nodes} nodes from {config.tree_top_k} tokens a head, wanted "
            f"{STATIC!r} or {BEST_FIRST!r}, at least a node and a token"
        )
    if config.tree == BEST_FIRST and config.choices is not None:
        raise ConfigError(f"choices are a static tree, and tree is {BEST_FIRST!r}; leave one out")
    if config.tree == BEST_FIRST:
        return []
    if config.choices is None:
        return [path for path in default_choices(config.num_heads) if max(path) < draft_tokens]
    choices = [tuple(int(rank) for rank in path) for path in config.choices]
    check_choices(choices, config.num_heads, draft_tokens)
    return choices
