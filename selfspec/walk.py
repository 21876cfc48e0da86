"""What every accept rule walks with: the source of chance, the target's scores at nodes, the children of nodes.

Letters: V vocabulary, K rows still walking.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from selfspec.tree import DraftTree


class Chance(Protocol):
    """The source of randomness, so that tests can walk all outcomes instead of sampling them."""

    def token(self, probs: Tensor) -> Tensor:
        """`[K, V]` float32 to one token per row, `[K]` int64."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""


class TorchChance:
    """Randomness from a torch generator; None uses torch's default one, which `torch.manual_seed` sets."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self.generator = generator
        self.device = device if generator is None else generator.device

    def token(self, probs: Tensor) -> Tensor:
        """See Chance."""
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)

    def coin(self, probability: float) -> bool:
        """See Chance."""
        return float(torch.rand((), generator=self.generator, device=self.device)) < probability


class NodeScores(Protocol):
    """Processed scores of the target at nodes of the tree."""

    def __call__(self, rows: list[int], paths: list[list[int]]) -> Tensor:
        """Scores `[K, V]` float32 at the last node of each row's path (node indices, the root first)."""


class Children:
    """Children of each node, per row, on the host."""

    def __init__(self, tree: DraftTree) -> None:
        self.tokens = tree.token_lists
        parents = tree.parents.expand_as(tree.tokens).tolist()
        real = None if tree.shape.real is None else tree.real().tolist()
        self.in_line = [links == list(range(-1, tree.nodes - 1)) for links in parents]
        """Per row, whether every node, real or not, hangs on the one before it."""
        self._of: list[dict[int, list[int]]] = []
        for row, links in enumerate(parents):
            children: dict[int, list[int]] = {}
            for node in range(1, tree.nodes):
                if real is None or real[row][node]:
                    children.setdefault(links[node], []).append(node)
            self._of.append(children)

    def of(self, row: int, node: int) -> list[int]:
        """The children of a node, in order."""
        return self._of[row].get(node, [])

    def find(self, row: int, node: int, token: int) -> int | None:
        """The first child that carries `token`."""
        return next((c for c in self.of(row, node) if self.tokens[row][c] == token), None)
