"""Rules that accept more than the target would have written. Lossy, on request.

Sampling: typical acceptance (Cai et al. 2024, section 2.3.1). Greedy: Stern et al. 2018. Its section 5.1 takes a guess
that is among the target's k likeliest tokens, section 5.2 one within a distance of the likeliest (for tokens that stand
for intensities), section 5.3 a minimum of tokens per round whatever they are.
Letters: V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.walk import Chance, Children, NodeScores

if TYPE_CHECKING:
    from selfspec.accept import AcceptRule

TYPICAL = "lossy-typical"
TOP_K, DISTANCE, MIN_BLOCK = "lossy-top-k", "lossy-distance", "lossy-min-block"
GREEDY_RULES = (TOP_K, DISTANCE, MIN_BLOCK)


def walk_loosely(row: int, children: Children, scores: NodeScores, rule: AcceptRule) -> tuple[list[int], list[int]]:
    """The accepted path of one row, and its tokens with the target's likeliest one after them."""
    path = [0]
    tokens: list[int] = []
    while True:
        found = scores([row], [path])[0]
        child = _taken(found, children.of(row, path[-1]), children.tokens[row], rule, len(path))
        if child is None:
            return path, [*tokens, int(found.argmax())]
        path.append(child)
        tokens.append(children.tokens[row][child])


def _taken(found: Tensor, nodes: list[int], tokens: list[int], rule: AcceptRule, depth: int) -> int | None:
    """The child that carries the target's likeliest token, else the likeliest of those that the rule lets pass.

    Args:
        found: `[V]`, the target's scores.
        nodes: the children.
        tokens: of all nodes of the row.
        rule: see `AcceptRule`.
        depth: of the children.
    """
    best = int(found.argmax())
    exact = [node for node in nodes if tokens[node] == best]
    if exact:
        return exact[0]
    passing = [node for node in nodes if _passes(found, best, tokens[node], rule, depth)]
    return max(passing, key=lambda node: float(found[tokens[node]]), default=None)


def _passes(found: Tensor, best: int, token: int, rule: AcceptRule, depth: int) -> bool:
    if rule.name == TOP_K:
        return int((found > found[token]).sum()) < rule.top_k
    if rule.name == DISTANCE:
        return (abs(best - token) if rule.metric is None else rule.metric(best, token)) <= rule.distance
    return depth < rule.min_block  # the target's own token is the last of the block


def walk_typical(
    row: int, children: Children, scores: NodeScores, rule: AcceptRule, chance: Chance
) -> tuple[list[int], list[int]]:
    """The deepest path of typical nodes, the likeliest among equals, then a token from p."""
    level, likelihood = [[0]], [0.0]
    while True:
        p = scores([row] * len(level), level).softmax(-1)
        bound = (rule.delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=rule.epsilon)
        deeper = [
            ([*path, child], likelihood[i] + float(p[i, children.tokens[row][child]].log()))
            for i, path in enumerate(level)
            for child in children.of(row, path[-1])
            if bool(p[i, children.tokens[row][child]] > bound[i])
        ]
        if not deeper:
            best = max(range(len(level)), key=lambda i: likelihood[i])
            last = int(chance.token(p[best : best + 1]))
            return level[best], [*(children.tokens[row][node] for node in level[best][1:]), last]
        level, likelihood = [path for path, _ in deeper], [weight for _, weight in deeper]
