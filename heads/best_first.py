"""The likeliest tree of a given size from per-depth marginals (DDTree: best-first expansion under a node budget).

A head that guesses several depths in one pass gives, for each depth, a distribution that does not know which token was
taken at the depth before. A path then scores the product of its marginals. Scores never grow along a path or from one
rank to the next, so taking the likeliest node next gives the best tree of every size.

Letters: B rows, N tree nodes, K depths, C ranks considered per depth, Q draft vocabulary.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.tree import DraftTree, TreeShape
from selfspec.vocab import DraftVocab


class Node(NamedTuple):
    """A guess: its parent (0 is the root, nodes count from 1), its depth from 0, and its rank among its siblings."""

    parent: int
    depth: int
    rank: int


def best_nodes(scores: Sequence[Sequence[float]], guesses: int) -> list[Node]:
    """The best nodes of one row, best first, so parents before children.

    Args:
        scores: per depth the log-probabilities of the ranks, falling; -inf is never taken.
        guesses: how many nodes, the root not counted; fewer come back where there are no more.
    """
    found: list[Node] = []
    frontier: list[tuple[float, int, Node]] = []
    order = itertools.count()  # equal scores: the one offered first

    def offer(before: float, node: Node) -> None:
        if node.depth < len(scores) and node.rank < len(scores[node.depth]):
            total = before + scores[node.depth][node.rank]
            if total > -math.inf:
                heapq.heappush(frontier, (-total, next(order), node))

    offer(0.0, Node(0, 0, 0))
    while frontier and len(found) < guesses:
        cost, _, node = heapq.heappop(frontier)
        found.append(node)
        offer(-cost - scores[node.depth][node.rank], node._replace(rank=node.rank + 1))
        offer(-cost, Node(len(found), node.depth + 1, 0))
    return found


def best_first(
    scores: Tensor, columns: Tensor, guesses: int, depths: Sequence[int] | None = None
) -> tuple[Tensor, TreeShape]:
    """The best tree of each row.

    Args:
        scores: `[B, K, C]` log-probabilities, falling along C.
        columns: `[B, K, C]` int64, the draft column of each.
        guesses: nodes of a tree, the root not counted.
        depths: per row the deepest node allowed; None allows K.

    Returns:
        Draft columns `[B, N - 1]` and the links of the tree with the root in front, `[B, N]`. Rows with fewer nodes
        than the largest are filled up with nodes that are not real.
    """
    batch, levels, ranks = scores.shape
    tables = scores.tolist()
    limits = [levels] * batch if depths is None else depths
    rows = [best_nodes(table[:limit], guesses) for table, limit in zip(tables, limits, strict=True)]
    count = max(map(len, rows))
    filler = Node(0, 0, 0)
    filled = [row + [filler] * (count - len(row)) for row in rows]
    parents = torch.tensor([[-1, *(node.parent for node in row)] for row in filled], device=scores.device)
    places = [[node.depth * ranks + node.rank for node in row] for row in filled]
    index = torch.tensor(places, dtype=torch.long, device=scores.device).view(batch, count)
    real = None
    if any(len(row) < count for row in rows):
        real = torch.tensor([[i <= len(row) for i in range(count + 1)] for row in rows], device=scores.device)
    return columns.flatten(1).gather(1, index), TreeShape(parents, real)


def likeliest_tree(root: Tensor, logits: Tensor, vocab: DraftVocab, ranks: int, guesses: int) -> DraftTree:
    """The best tree of each row from what a head says of each depth, in one pass.

    Args:
        root: `[B]`, the newest committed token.
        logits: `[B, K, Q]` over the draft vocabulary, in any floating dtype.
        vocab: says which token a column is.
        ranks: C, or less where the vocabulary is smaller.
        guesses: nodes of a tree, the root not counted.
    """
    logits = logits.float()
    scores, columns = logits.topk(min(ranks, logits.shape[-1]))
    columns, shape = best_first(scores - logits.logsumexp(-1, keepdim=True), columns, guesses)
    return DraftTree(torch.cat([root.unsqueeze(1), vocab.to_target(columns)], 1), shape)
