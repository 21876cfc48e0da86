"""Is the q that a draft hands over the very distribution its nodes were drawn from?

Every drawn node gives one number: where its token lies in q, tokens ordered by their probability, with a uniform draw
inside the token's own share (the randomised probability integral transform). If the nodes were drawn from q these
numbers are uniform, whatever q is at each node, so nodes of all trees go into one Kolmogorov-Smirnov test. The first
child of the root, whose q is the same in every tree, is tested against it by chi-square too.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.stats import kstest
from torch import Tensor

from selfspec.draft import Budget, Draft, Sampling, Verified
from selfspec.inference.certify.statistics import fit
from selfspec.tree import DraftTree, Drawn

_ENOUGH, _LOOKS = 20, 8


def draws_check(draft: Draft, verified: Verified, sampling: Sampling, trees: int, seed: int, alpha: float) -> Any:
    """Draw many trees in one place and test them.

    Args:
        draft: the draft.
        verified: what the target read there; the rows are looked at together.
        sampling: as the draft is told.
        trees: how many to draw.
        seed: of all draws.
        alpha: chance of a false alarm that is allowed here.

    Returns:
        Counts, p-values, and whether they pass; a draft that draws nothing passes with 0 nodes.
    """
    generator = torch.Generator(verified.tokens.device).manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1)
    places: list[float] = []
    first: list[int] = []
    q: list[float] = []
    impossible = 0
    for drawn_so_far in range(trees):
        if drawn_so_far == _LOOKS and not places and not impossible:
            break  # a draft that chooses; its trees need no q
        tree = draft.propose(draft.begin(verified), Budget(), sampling, generator)
        if tree.drawn is None:
            continue
        for row in range(tree.tokens.shape[0]):
            found = _places(tree, tree.drawn, row, own)
            impossible += sum(place is None for place in found)
            places += [place for place in found if place is not None]
        column = _first_column(tree, tree.drawn)
        if column is not None:
            first.append(column)
            q = tree.drawn.probs[0, _source(tree.drawn, 0, 1, 0)].double().tolist()
    return _verdict(places, first, q, impossible, trees, alpha)


def _verdict(
    places: list[float], first: list[int], q: list[float], impossible: int, trees: int, alpha: float
) -> dict[str, Any]:
    uniform = float(kstest(places, "uniform").pvalue) if len(places) >= _ENOUGH else None
    counts = [0] * len(q)
    for column in first:
        counts[column] += 1
    chi = fit(counts, q) if len(first) >= _ENOUGH else None
    tests = [p for p in (uniform, None if chi is None else chi.p_value) if p is not None]
    return {
        "trees": trees,
        "drawn_nodes": len(places),
        "impossible_nodes": impossible,
        "uniform_p_value": uniform,
        "first_child_p_value": None if chi is None else chi.p_value,
        "alpha": alpha,
        "passed": impossible == 0 and all(p > alpha / 2 for p in tests),
    }


def _first_column(tree: DraftTree, drawn: Drawn) -> int | None:
    """The column of the root's first child in row 0, if it was drawn and exists in the draft's vocabulary."""
    if tree.nodes < 2 or not bool(tree.real()[0, 1]) or (drawn.drawn is not None and not bool(drawn.drawn[0, 1])):
        return None
    return _column(drawn, int(tree.tokens[0, 1]))


def _source(drawn: Drawn, row: int, node: int, parent: int) -> int:
    """The row of `probs` that a node was drawn from."""
    return parent if drawn.sources is None else int(drawn.sources[row, node])


def _column(drawn: Drawn, token: int) -> int | None:
    if drawn.token_ids is None:
        return token
    found = (drawn.token_ids == token).nonzero()
    return int(found[0]) if len(found) else None


def _places(tree: DraftTree, drawn: Drawn, row: int, own: torch.Generator) -> list[float | None]:
    """One number in 0..1 per drawn node of a row; None where q gives the token no chance."""
    parents, real = tree.parents.expand_as(tree.tokens)[row].tolist(), tree.real()[row].tolist()
    found: list[float | None] = []
    left: dict[tuple[int, int], Tensor] = {}
    for node in range(1, tree.nodes):
        if not real[node] or (drawn.drawn is not None and not bool(drawn.drawn[row, node])):
            continue
        source = _source(drawn, row, node, parents[node])
        q = left.setdefault((parents[node], source), drawn.probs[row, source].double().clone())
        column = _column(drawn, int(tree.tokens[row, node]))
        if column is None or float(q[column]) <= 0:
            found.append(None)
            continue
        share = float(q[column])
        above = float(q[q > share].sum()) + float(q[:column][q[:column] == share].sum())
        found.append((above + share * float(torch.rand((), generator=own, dtype=torch.float64))) / float(q.sum()))
        if not drawn.with_replacement:
            q[column] = 0.0
    return found
