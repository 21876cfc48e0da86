"""What every accept rule walks with: the source of chance, the target's scores at nodes, the children of nodes.

Letters: V vocabulary, K rows still walking.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from selfspec.drawing import draw, wide
from selfspec.tree import DraftTree


class Chance(Protocol):
    """The source of randomness, so that tests can walk all outcomes instead of sampling them."""

    def token(self, probs: Tensor) -> Tensor:
        """`[K, V]` float32 to one token per row, `[K]` int64; NO_TOKEN where there is no distribution."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""


class TorchChance:
    """Randomness from a torch generator; None uses torch's default one, which `torch.manual_seed` sets."""

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self.generator = generator
        self.device = device if generator is None else generator.device

    def token(self, probs: Tensor) -> Tensor:
        """See Chance."""
        numbers = torch.rand(probs.shape[0], generator=self.generator, device=self.device, dtype=wide(self.device))
        return draw(probs, numbers.to(probs.device))

    def coin(self, probability: float) -> bool:
        """See Chance."""
        return float(torch.rand((), generator=self.generator, device=self.device)) < probability

    def numbers(self, count: int) -> Tensor:
        """`[count]` float64, uniform in [0, 1), on the CPU."""
        return torch.rand(count, generator=self.generator, device=self.device, dtype=wide(self.device)).double().cpu()


class NodeTokens(Protocol):
    """The target's own tokens at nodes of the tree."""

    def __call__(self, rows: list[int], paths: list[list[int]]) -> list[int]:
        """One token at the last node of each row's path (node indices, the root first)."""


class NodeScores(Protocol):
    """Processed scores of the target at nodes of the tree."""

    def __call__(self, rows: list[int], paths: list[list[int]]) -> Tensor:
        """Scores `[K, V]` float32 at the last node of each row's path (node indices, the root first)."""


class Children:
    """Children of each node, per row, on the host."""

    def __init__(self, tree: DraftTree) -> None:
        self.tokens, shape = tree.token_lists, tree.shape.host
        rows, line = range(tree.tokens.shape[0]), list(range(-1, tree.nodes - 1))
        self.in_line = [shape.links(row) == line for row in rows]
        """Per row, whether every node, real or not, hangs on the one before it."""
        self._of: list[dict[int, list[int]]] = []
        for row in rows:
            children: dict[int, list[int]] = {}
            links, real = shape.links(row), shape.flags(row)
            for node in range(1, tree.nodes):
                if real is None or real[node]:
                    children.setdefault(links[node], []).append(node)
            self._of.append(children)

    def of(self, row: int, node: int) -> list[int]:
        """The children of a node, in order."""
        return self._of[row].get(node, [])

    def find(self, row: int, node: int, token: int) -> int | None:
        """The first child that carries `token`."""
        return next((c for c in self.of(row, node) if self.tokens[row][c] == token), None)
