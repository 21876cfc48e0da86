"""Scripted drafts, made through the public Draft interface, and helpers that call `generate` with them.

Letters: B rows, N tree nodes, Q draft vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

import selfspec
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.tree import DraftTree, Drawn, TreeShape


@dataclass(eq=False)
class Rows(DraftState):
    """Committed tokens of each row, and the number of the row in the batch that began."""

    tokens: list[list[int]]
    names: list[int]
    round: int = 0

    def select(self, rows: Tensor) -> Rows:
        """Some rows."""
        kept = rows.tolist()
        return Rows([self.tokens[row] for row in kept], [self.names[row] for row in kept], self.round)


class Scripted:
    """A draft that keeps the text of each row and leaves the tree to `tree`."""

    kind = "scripted"
    needs = Needs()

    def begin(self, verified: Verified) -> Rows:
        """Remember the prompts."""
        read = zip(verified.tokens.tolist(), verified.counts.tolist(), verified.root.tolist(), strict=True)
        rows = [tokens[:count] + [root] for tokens, count, root in read]
        return Rows(rows, list(range(len(rows))))

    def observe(self, state: Rows, verified: Verified) -> Rows:
        """Remember what was committed."""
        read = zip(state.tokens, verified.next_tokens.tolist(), verified.counts.tolist(), strict=True)
        for row, tokens, count in read:
            row += tokens[:count]
        return Rows(state.tokens, state.names, state.round + 1)

    def propose(self, state: Rows, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """A tree."""
        return self.tree(state, budget, generator)

    def tree(self, state: Rows, budget: Budget, generator: torch.Generator | None) -> DraftTree:
        raise NotImplementedError


Guess = tuple[list[int], list[int]]
"""Tokens and parents of one row's nodes, the root included."""


def as_tree(guesses: Sequence[Guess], shared: bool = False) -> DraftTree:
    """Trees of several sizes as one batch. Missing nodes hang on the root and are not real."""
    nodes = max(len(tokens) for tokens, _ in guesses)
    filled = [(tokens + [tokens[0]] * (nodes - len(tokens))) for tokens, _ in guesses]
    parents = [links + [0] * (nodes - len(links)) for _, links in guesses]
    real = torch.tensor([[i < len(tokens) for i in range(nodes)] for tokens, _ in guesses])
    shape = TreeShape(torch.tensor(parents[:1] if shared else parents), None if bool(real.all()) else real)
    return DraftTree(torch.tensor(filled), shape)


class Oracle(Scripted):
    """Knows the right continuation, and errs on purpose.

    Args:
        references: per row (or one for all rows) the whole right text, prompt and continuation, without padding.
        make: builds one row's guess from its root, the right tokens that follow, its number and the round.
    """

    kind = "oracle"

    def __init__(self, references: Sequence[Sequence[int]], make: Callable[[int, list[int], int, int], Guess]) -> None:
        self.references = [list(map(int, reference)) for reference in references]
        self.make = make
        self.proposed: list[DraftTree] = []

    def tree(self, state: Rows, budget: Budget, generator: torch.Generator | None) -> DraftTree:
        guesses = []
        for tokens, name in zip(state.tokens, state.names, strict=True):
            reference = self.references[name % len(self.references)]
            agrees = reference[: len(tokens)] == tokens
            truth = reference[len(tokens) :] if agrees else []
            guesses.append(self.make(tokens[-1], truth, name, state.round))
        self.proposed.append(as_tree(guesses))
        return self.proposed[-1]


def chain(length: int, right: Callable[[int, int], int] | int | None = None, vocab: int = 97) -> Any:
    """Guesses in a line, of which the first `right` (a number, or a function of row and round) are right."""

    def make(root: int, truth: list[int], row: int, turn: int) -> Guess:
        good = length if right is None else right(row, turn) if callable(right) else right
        tokens = [root]
        for place in range(length):
            true = truth[place] if place < len(truth) else 0
            tokens.append(true if place < good else (true + 1 + place) % vocab)
        return tokens, list(range(-1, length))

    return make


def bushy(length: int, siblings: int, vocab: int = 97) -> Any:
    """At every level the right token comes last of `siblings`, and only it goes on."""

    def make(root: int, truth: list[int], row: int, turn: int) -> Guess:
        tokens, parents, trunk = [root], [-1], 0
        for place in range(length):
            true = truth[place] if place < len(truth) else 0
            for sibling in range(siblings, 0, -1):
                tokens.append((true + sibling - 1) % vocab)
                parents.append(trunk)
            trunk = len(tokens) - 1
        return tokens, parents

    return make


def random_trees(seed: int, nodes: int, hit: float, ragged: bool = True, deep: float = 0.5, vocab: int = 97) -> Any:
    """Random trees that hold the right continuation now and then.

    Args:
        seed: of the generator that all rows and rounds share.
        nodes: the most guesses per row.
        hit: chance that a node that could carry the right token does.
        ragged: rows draw their own number of guesses, zero included.
        deep: chance that a node hangs on the node before it, instead of any earlier one.
        vocab: size of the vocabulary.
    """
    chance = random.Random(seed)

    def make(root: int, truth: list[int], row: int, turn: int) -> Guess:
        count = chance.randint(0, nodes) if ragged else nodes
        tokens, parents, on_path = [root], [-1], {0: 0}
        for node in range(1, count + 1):
            parent = node - 1 if chance.random() < deep else chance.randrange(node)
            level = on_path.get(parent)
            if level is not None and level < len(truth) and chance.random() < hit:
                tokens.append(truth[level])
                on_path[node] = level + 1
            else:
                tokens.append(chance.randrange(vocab))
            parents.append(parent)
        return tokens, parents

    return make


class DrawnTree(Scripted):
    """Draws children from a q that depends on the newest token only.

    Args:
        table: `[V, Q]` float32; row t is q after token t.
        branches: children per node at each level; only the first child of a node goes on.
        with_replacement: draw siblings independently.
        token_ids: `[Q]`, the target's ids of the columns.
    """

    kind = "drawn"

    def __init__(
        self, table: Tensor, branches: Sequence[int], with_replacement: bool, token_ids: Tensor | None = None
    ) -> None:
        self.table = table
        self.branches = branches
        self.with_replacement = with_replacement
        self.token_ids = token_ids

    def tree(self, state: Rows, budget: Budget, generator: torch.Generator | None) -> DraftTree:
        newest = torch.tensor([tokens[-1] for tokens in state.tokens])
        parents, trunk, columns = [-1], 0, [newest]
        for width in self.branches:
            q = self.table[columns[trunk]]
            drawn = torch.multinomial(q, width, self.with_replacement, generator=generator)
            drawn = drawn if self.token_ids is None else self.token_ids[drawn]
            parents += [trunk] * width
            trunk = len(columns)
            columns += list(drawn.unbind(1))
        tokens = torch.stack(columns, 1)
        drawn = Drawn(self.table[tokens], None, self.with_replacement, self.token_ids)
        return DraftTree(tokens, TreeShape(torch.tensor([parents])), drawn)


def plain(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """transformers' own `generate`, whether the model is patched or not."""
    return GenerationMixin.generate(model, *args, **kwargs)


@contextmanager
def patched(model: PreTrainedModel, draft: Any, **kwargs: Any) -> Any:
    """The model, patched for as long as the block runs."""
    selfspec.patch(model, draft, **kwargs)
    try:
        yield model
    finally:
        selfspec.unpatch(model)


def unpadded(sequences: Tensor, attention_mask: Tensor | None = None) -> list[list[int]]:
    """Rows as lists, without their left padding."""
    if attention_mask is None:
        return sequences.tolist()
    skipped = (attention_mask == 0).sum(1).tolist()
    return [row[skip:] for row, skip in zip(sequences.tolist(), skipped, strict=True)]


def left_padded(prompts: Sequence[Sequence[int]], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths as one batch, and its attention mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask
