"""Trees of several drafts as one tree, without losing what makes sampling exact.

A token that two drafts put at the same place becomes one node, which has the children of both. Unless both chose it
without chance, a second node without children stays beside the first: the accept rule must still hear of that draw (see
`selfspec.accept`), and which siblings there are, and with them the rule that applies, must not depend on the draw.

Letters: B rows, N nodes of the merged tree, K nodes of one part's tree, R rows of draft distributions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.errors import DraftTreeError
from selfspec.tree import DraftTree, Drawn, TreeShape


@dataclass(eq=False)
class Merged:
    """What `merge` made.

    Args:
        tree: all parts in one.
        places: per row and part, the node of the merged tree that each node of the part's tree became.
        owners: per row, the part that each node came from first; -1 for the root.
    """

    tree: DraftTree
    places: list[list[list[int]]]
    owners: list[list[int]]


def merge(trees: Sequence[DraftTree], by_turns: bool, vocab_size: int) -> Merged:
    """One tree of several that share their root.

    Args:
        trees: one per part.
        by_turns: siblings are judged in turns, one of each part after the other; otherwise the first part's come first.
        vocab_size: V, for distributions of parts whose draft vocabularies differ.

    Raises:
        DraftTreeError: some parts drew siblings with replacement and others without.
    """
    drawn = [tree.drawn for tree in trees]
    starts = _starts(drawn)
    flags = [_flags(tree) for tree in trees]
    sources = [None if d is None else _sources(tree, d).tolist() for tree, d in zip(trees, drawn, strict=True)]
    order = _order(trees, by_turns)
    rows = []
    for b in range(trees[0].tokens.shape[0]):
        row = _Row(trees[0].token_lists[b][0], len(trees))
        for part, node in order[b]:
            source = starts[part] + sources[part][b][node] if flags[part][b][node] else None  # type: ignore[index]
            parent = int(trees[part].parents[b if trees[part].parents.shape[0] > 1 else 0, node])
            row.add(part, node, parent, trees[part].token_lists[b][node], source)
        rows.append(row)
    device = trees[0].tokens.device
    tree = _tree(rows, device, _probs(drawn, vocab_size))
    return Merged(tree, [row.lists(trees) for row in rows], [row.owners for row in rows])


@dataclass(eq=False)
class _Row:
    """The merged tree of one row while it grows."""

    root: int
    parts: int
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    sources: list[int] = field(init=False)
    owners: list[int] = field(init=False)
    place: list[dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.sources, self.owners = [self.root], [-1], [-1], [-1]
        self.place = [{0: 0} for _ in range(self.parts)]
        self._first: dict[tuple[int, int], int] = {}

    def add(self, part: int, node: int, parent: int, token: int, source: int | None) -> None:
        """Take in one node of a part's tree; `source` is the row it was drawn from, None if it was chosen."""
        above = self.place[part][parent]
        known = self._first.setdefault((above, token), len(self.tokens))
        self.place[part][node] = known
        if known == len(self.tokens) or source is not None or self.sources[known] >= 0:
            self.tokens.append(token)
            self.parents.append(above)
            self.sources.append(-1 if source is None else source)
            self.owners.append(part)

    def lists(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Places as lists; nodes that are not real stand at -1."""
        return [[place.get(i, -1) for i in range(tree.nodes)] for place, tree in zip(self.place, trees, strict=True)]


def _order(trees: Sequence[DraftTree], by_turns: bool) -> list[list[tuple[int, int]]]:
    """Per row the (part, node) pairs in the order in which they enter, which is that of siblings in the merged tree."""
    order = []
    for b in range(trees[0].tokens.shape[0]):
        keyed = []
        for part, tree in enumerate(trees):
            row = b if tree.parents.shape[0] > 1 else 0
            depth, parents, real = tree.shape.depth[row].tolist(), tree.parents[row].tolist(), tree.real()[b].tolist()
            elder: dict[int, int] = {}
            for node in range(1, tree.nodes):
                if real[node]:
                    rank = elder[parents[node]] = elder.get(parents[node], -1) + 1
                    keyed.append(((depth[node], rank if by_turns else 0, part, node), (part, node)))
        order.append([pair for _, pair in sorted(keyed)])
    return order


def _flags(tree: DraftTree) -> list[list[bool]]:
    """Which nodes were drawn."""
    if tree.drawn is None:
        return [[False] * tree.nodes] * tree.tokens.shape[0]
    flags: list[list[bool]] = (
        torch.ones_like(tree.tokens, dtype=torch.bool) if tree.drawn.drawn is None else tree.drawn.drawn
    ).tolist()
    return flags


def _sources(tree: DraftTree, drawn: Drawn) -> Tensor:
    return tree.parents.expand_as(tree.tokens) if drawn.sources is None else drawn.sources


def _starts(drawn: Sequence[Drawn | None]) -> list[int]:
    """Where each part's rows of distributions begin once they are put together."""
    starts, total = [], 0
    for record in drawn:
        starts.append(total)
        total += 0 if record is None else record.probs.shape[1]
    return starts


def _probs(drawn: Sequence[Drawn | None], vocab_size: int) -> Drawn | None:
    """All parts' distributions over common columns; flags and sources are still to be filled in."""
    found = [record for record in drawn if record is not None]
    if not found:
        return None
    if len({record.with_replacement for record in found}) > 1:
        raise DraftTreeError(
            "some drafts drew siblings with replacement and others without; make all of them draw the same way"
        )
    ids = found[0].token_ids
    if all(_same_columns(record.token_ids, ids) for record in found):
        return Drawn(torch.cat([r.probs for r in found], 1), None, found[0].with_replacement, ids)
    return Drawn(torch.cat([_widened(r, vocab_size) for r in found], 1), None, found[0].with_replacement)


def _same_columns(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _widened(record: Drawn, vocab_size: int) -> Tensor:
    """Distributions over the target's whole vocabulary, `[B, R, V]`."""
    if record.token_ids is None:
        return record.probs
    wide = record.probs.new_zeros(*record.probs.shape[:2], vocab_size)
    wide[:, :, record.token_ids] = record.probs
    return wide


def _tree(rows: Sequence[_Row], device: torch.device, probs: Drawn | None) -> DraftTree:
    """Rows of several sizes as one batch; missing nodes hang on the one before them (see `Drawn`) and are not real."""
    sizes = [len(row.tokens) for row in rows]
    nodes = max(sizes)

    def filled(lists: Sequence[list[int]], value: Sequence[int]) -> Tensor:
        return torch.tensor([x + [v] * (nodes - len(x)) for x, v in zip(lists, value, strict=True)], device=device)

    tokens = filled([row.tokens for row in rows], [row.root for row in rows])
    parents = torch.tensor([row.parents + list(range(len(row.parents) - 1, nodes - 1)) for row in rows], device=device)
    real = None
    if min(sizes) < nodes:
        real = torch.arange(nodes, device=device) < torch.tensor(sizes, device=device).unsqueeze(1)
    if probs is None:
        return DraftTree(tokens, TreeShape(parents, real))
    sources = filled([row.sources for row in rows], [-1] * len(rows))
    record = Drawn(probs.probs, sources >= 0, probs.with_replacement, probs.token_ids, sources)
    return DraftTree(tokens, TreeShape(parents, real), record)
