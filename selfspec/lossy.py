"""Accepting more than the target would have written, when greedy (Stern et al. 2018, section 5). Lossy, on request.

Section 5.1 takes a guess that is among the target's k likeliest tokens, section 5.2 one within a distance of the
likeliest (for tokens that stand for intensities), section 5.3 a minimum of tokens per round whatever they are.
Letters: V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from selfspec.accept import AcceptRule, Children, NodeScores

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
