"""Prompt lookup: what followed the last few tokens earlier in the text may follow again (Saxena 2023).

Several earlier places become branches of one tree. No weights, and nothing is read from the target.
Letters: B rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape


@dataclass(kw_only=True)
class LookupConfig:
    """Configuration of prompt lookup.

    Args:
        max_ngram: longest suffix to look for.
        min_ngram: shortest suffix that counts as a match.
        nodes: nodes of a tree, the root included, unless the budget says otherwise.
        branches: how many earlier places may contribute to one tree.
        trunk: share of the guesses given to the best continuation.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    nodes: int = 12
    branches: int = 4
    trunk: float = 0.7

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(f"n-grams from {self.min_ngram} to {self.max_ngram} make no range of lengths")
        if self.nodes < 1 or self.branches < 1 or not 0 < self.trunk <= 1:
            raise ConfigError(
                f"prompt lookup wants nodes and branches >= 1 and 0 < trunk <= 1, got {self.nodes}, {self.branches} "
                f"and {self.trunk}"
            )


class History:
    """The tokens of one row, and for every n-gram the places where it ended, newest first.

    The places of one n-gram form a linked list (a hash chain as in LZ77), so a new token costs one step per length.
    """

    def __init__(self, config: LookupConfig) -> None:
        self.config = config
        self.tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        self._older: list[list[int]] = [[] for _ in range(config.max_ngram + 1)]

    def extend(self, tokens: list[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for length in range(self.config.min_ngram, self.config.max_ngram + 1):
                gram = tuple(self.tokens[end - length : end]) if length <= end else None
                self._older[length].append(self._newest.get(gram, 0) if gram else 0)
                if gram:
                    self._newest[gram] = end

    def matches(self) -> Iterator[int]:
        """Ends of earlier occurrences of the text's suffix, longest suffix first, then newest first, each once."""
        seen = {len(self.tokens)}
        for length in range(self.config.max_ngram, self.config.min_ngram - 1, -1):
            end = self._older[length][-1]
            while end:
                if end not in seen:
                    seen.add(end)
                    yield end
                end = self._older[length][end - 1]

    def continuation(self, end: int, count: int) -> list[int]:
        """The `count` tokens after place `end`; past the newest token the copy goes on with itself."""
        copied = self.tokens[end : end + count]
        while len(copied) < count:
            copied.append(copied[len(copied) - (len(self.tokens) - end)])
        return copied


@dataclass(eq=False)
class LookupState(DraftState):
    """One history per row."""

    rows: list[History]
    device: torch.device

    def select(self, rows: Tensor) -> LookupState:
        """The state of some rows."""
        return LookupState([self.rows[row] for row in rows.tolist()], self.device)


class _Trie:
    """Continuations merged at their common beginnings. Node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self._children: dict[tuple[int, int], int] = {}

    def insert(self, tokens: list[int], room: int) -> None:
        """Add a path from the root, creating at most `room` nodes."""
        node = 0
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                if room <= 0:
                    return
                room -= 1
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self._children[node, token] = child
            node = child


@register("lookup")
class Lookup:
    """The n-gram draft."""

    kind: str
    config_class = LookupConfig
    needs = Needs()

    def __init__(self, config: LookupConfig | None = None) -> None:
        self.config = config or LookupConfig()

    @classmethod
    def from_target(
        cls, config: LookupConfig | None = None, target: Target | None = None, generator: torch.Generator | None = None
    ) -> Lookup:
        """As other methods; the target is not looked at."""
        return cls(config)

    def begin(self, verified: Verified) -> LookupState:
        """Index the prompt."""
        histories = [History(self.config) for _ in range(verified.tokens.shape[0])]
        for history, first in zip(histories, verified.tokens[:, 0].tolist(), strict=True):
            history.extend([first])
        return self.observe(LookupState(histories, verified.tokens.device), verified)

    def observe(self, state: LookupState, verified: Verified) -> LookupState:
        """Index the accepted tokens."""
        rows = zip(state.rows, verified.next_tokens.tolist(), verified.counts.tolist(), strict=True)
        for history, tokens, count in rows:
            history.extend(tokens[:count])
        return state

    def propose(self, state: LookupState, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        """A trie of what followed before; the root alone where nothing matches."""
        guesses = (self.config.nodes if budget.nodes is None else budget.nodes) - 1
        return _batch([self._trie(history, guesses, budget.depth) for history in state.rows], state.device)

    def _trie(self, history: History, guesses: int, depth: int) -> _Trie:
        trie = _Trie(history.tokens[-1])
        depth = min(depth, guesses)
        if depth < 1:
            return trie
        best: list[int] = []
        for _, end in zip(range(self.config.branches), history.matches(), strict=False):
            path = history.continuation(end, depth)
            room = guesses + 1 - len(trie.tokens)
            trie.insert(path, min(room, ceil(self.config.trunk * guesses)) if not best else room)
            best = best or path
        trie.insert(best, guesses + 1 - len(trie.tokens))
        return trie


def _batch(tries: list[_Trie], device: torch.device) -> DraftTree:
    """Trees of several sizes as one batch; missing nodes are marked as not real."""
    sizes = [len(trie.tokens) for trie in tries]
    nodes = max(sizes)
    tokens = torch.tensor(
        [trie.tokens + [trie.tokens[0]] * (nodes - size) for trie, size in zip(tries, sizes, strict=True)]
    )
    parents = torch.tensor([trie.parents + [0] * (nodes - size) for trie, size in zip(tries, sizes, strict=True)])
    real = None
    if min(sizes) < nodes:
        real = (torch.arange(nodes) < torch.tensor(sizes).unsqueeze(1)).to(device)
    return DraftTree(tokens.to(device), TreeShape(parents.to(device), real))
