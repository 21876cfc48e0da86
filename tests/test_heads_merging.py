"""Trees of several drafts merged into one: by full enumeration of all draws, the target's distribution is kept.

Each draft draws a tree from its own q; the merged tree is judged by the library's accept rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import test_accept
import torch
from test_accept import PLAIN, TOLERANCE, WARPS, Branching, Fixed, Spec, Table

from selfspec.errors import DraftTreeError
from selfspec.heads.merging import merge
from selfspec.tree import DraftTree, Drawn, TreeShape

Merge = Callable[[Sequence[DraftTree]], DraftTree]


@dataclass
class Drafter:
    """A draft's own q and the tree it makes; logits are never asked of it."""

    q_of: Any
    spec: Spec

    @property
    def vocab(self) -> int:
        return int(self.q_of.vocab)

    def q(self, path: tuple[int, ...], columns: int) -> torch.Tensor:
        return self.q_of.q(path, columns)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens on the way to each node."""
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(tree.parents[0].tolist()[1:], tree.tokens[0].tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def distance(
    table: Any,
    drafters: Sequence[Drafter],
    monkeypatch: pytest.MonkeyPatch,
    warp: Any = None,
    join: Merge | None = None,
) -> float:
    """Total variation from the target, over all draws of all drafts and of the accept rule."""

    def joint(table: Any, spec: Spec, chance: Branching) -> tuple[DraftTree, list[tuple[int, ...]]]:
        trees = [original(drafter, drafter.spec, chance)[0] for drafter in drafters]
        tree = merge(trees, True, table.vocab).tree if join is None else join(trees)
        tree.check(tree.tokens[:, 0], table.vocab)
        return tree, paths_of(tree)

    original = test_accept.draft
    deepest = max((d.spec for d in drafters), key=lambda spec: spec.depth)
    with monkeypatch.context() as patch:
        patch.setattr(test_accept, "draft", joint)
        return test_accept.distance(table, deepest, warp)


ONE, PAIR, LINE = {(): "d"}, {(): "dd"}, {(): "d", (0,): "d"}
CASES: dict[str, tuple[int, list[Spec]]] = {
    "two drafts, one token each": (4, [Spec(ONE), Spec(ONE)]),
    "three drafts, one token each": (3, [Spec(ONE), Spec(ONE), Spec(ONE)]),
    "two chains of two": (3, [Spec(LINE), Spec(LINE)]),
    "three drafts, one of them a chain": (3, [Spec(LINE), Spec(ONE), Spec(ONE)]),
    "siblings without replacement twice": (3, [Spec(PAIR, False), Spec(PAIR, False)]),
    "siblings with replacement and one more": (3, [Spec(PAIR), Spec(ONE)]),
    "chosen beside drawn": (4, [Spec({(): "01"}), Spec(LINE)]),
    "drawn beside chosen": (4, [Spec(LINE), Spec({(): "01", (0,): "1"})]),
    "a chain chosen beside a chain drawn": (3, [Spec({(): "0", (0,): "0"}), Spec(LINE)]),
    "a chain drawn beside a chain chosen": (3, [Spec(LINE), Spec({(): "0", (0,): "0"})]),
    "chosen between two drawn": (3, [Spec(ONE), Spec({(): "0"}), Spec(ONE)]),
    "different draft vocabularies": (4, [Spec(LINE, token_ids=(0, 2)), Spec(ONE, token_ids=(1, 2, 3))]),
}


def drafters(vocab: int, specs: Sequence[Spec]) -> list[Drafter]:
    return [Drafter(Table(vocab, 20 + 7 * i, PLAIN), spec) for i, spec in enumerate(specs)]


@pytest.mark.parametrize("by_turns", [True, False], ids=["by turns", "one after the other"])
@pytest.mark.parametrize("name", CASES)
def test_merged_drafts_keep_the_targets_distribution(
    name: str, by_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, specs = CASES[name]
    warp, processors = list(WARPS.values())[list(CASES).index(name) % len(WARPS)]
    table = Table(vocab, 3, processors())

    def join(trees: Sequence[DraftTree]) -> DraftTree:
        return merge(trees, by_turns, vocab).tree

    found = distance(table, drafters(vocab, specs), monkeypatch, warp, join)
    assert found < TOLERANCE, f"{name}: total variation {found:.2e}"


# Planted faults

P = Fixed([0.3, 0.3, 0.25, 0.15], [], PLAIN)
Q1, Q2 = [0.1, 0.1, 0.5, 0.3], [0.4, 0.1, 0.2, 0.3]
TWO = [Drafter(Fixed([1.0] * 4, q, PLAIN), Spec(ONE)) for q in (Q1, Q2)]


def _with_mean_q(trees: Sequence[DraftTree]) -> DraftTree:
    """All siblings judged by the mean of the drafts' distributions."""
    tree = merge(trees, True, 4).tree
    assert tree.drawn is not None
    mean = torch.tensor([[Q1, Q2]]).mean(1, keepdim=True).expand(1, tree.nodes, 4)
    return DraftTree(tree.tokens, tree.shape, Drawn(mean))


def _with_first_q(trees: Sequence[DraftTree]) -> DraftTree:
    """All siblings judged by the first draft's distribution."""
    tree = merge(trees, True, 4).tree
    return DraftTree(tree.tokens, tree.shape, Drawn(torch.tensor([[Q1] * tree.nodes])))


def _without_duplicates(trees: Sequence[DraftTree]) -> DraftTree:
    """The second draw of a token left out, as merging trees of tokens suggests."""
    tree = merge(trees, True, 4).tree
    if len(set(tree.tokens[0, 1:].tolist())) == tree.nodes - 1:
        return tree
    assert tree.drawn is not None
    index = torch.tensor([0, 1])
    return DraftTree(tree.tokens[:, index], tree.shape.keep(index), tree.drawn.keep(index))


@pytest.mark.parametrize("wrong", [_with_mean_q, _with_first_q, _without_duplicates])
def test_distributions_merged_wrongly_are_seen(wrong: Merge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(P, TWO, monkeypatch) < TOLERANCE
    found = distance(P, TWO, monkeypatch, join=wrong)
    assert found > 0.01, f"total variation {found:.2e}"


def test_a_chain_judged_as_a_block_only_where_the_draw_equals_the_choice_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # p = (.2, .3, .5), q = (.6, .3, .1), draws 0 and 0: the block keeps the first with 1/9 + 8/9 * 1/11 = .19, node by
    # node it is kept with 1/3. The other draws would have to make up for it.
    chosen = Spec({(): "0", (0,): "0"})
    both = [Drafter(Fixed([1.0] * 3, [0.6, 0.3, 0.1], PLAIN), spec) for spec in (Spec(LINE), chosen)]

    def wrong(trees: Sequence[DraftTree]) -> DraftTree:
        found = merge(trees, True, 3).tree
        assert found.drawn is not None
        if trees[0].tokens.tolist() != trees[1].tokens.tolist():
            return found
        index = torch.tensor([0, 1, 3])
        return DraftTree(found.tokens[:, index], found.shape.keep(index), found.drawn.keep(index))

    table = Fixed([0.2, 0.3, 0.5], [], PLAIN)
    assert distance(table, both, monkeypatch) < TOLERANCE
    found = distance(table, both, monkeypatch, join=wrong)
    assert found > 0.001, f"total variation {found:.2e}"


@pytest.mark.parametrize("told", [True, False], ids=["missing branch in its place", "missing branch left out"])
def test_a_branch_that_is_there_or_not_by_what_was_drawn_keeps_the_rule(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain judged as a block after some draws and node by node after others is lossy."""
    line = Spec({(): "d", (0,): "d", (0, 0): "d"})
    alone = [Drafter(Fixed([1.0] * 3, [0.6, 0.3, 0.1], PLAIN), line)]

    def branching(trees: Sequence[DraftTree]) -> DraftTree:
        (chain,) = trees
        assert chain.drawn is not None
        there = int(chain.tokens[0, 2]) == 0
        if not there and not told:
            return chain
        parents = torch.tensor([[-1, 0, 1, 2, 2]])
        real = None if there else torch.tensor([[True] * 4 + [False]])
        tokens = torch.cat([chain.tokens, torch.tensor([[2]])], 1)
        probs = torch.cat([chain.drawn.probs, chain.drawn.probs[:, :1]], 1)
        return DraftTree(tokens, TreeShape(parents, real), Drawn(probs, torch.tensor([[False] + [True] * 3 + [False]])))

    found = distance(Fixed([0.2, 0.3, 0.5], [], PLAIN), alone, monkeypatch, join=branching)
    assert found < TOLERANCE if told else found > 0.001, f"total variation {found:.2e}"


def test_a_second_draft_raises_the_chance_of_acceptance_to_what_the_paper_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One draft accepts sum min(p, q1) = .1 + .1 + .25 + .15 = .6 and leaves p = (.5, .5, 0, 0), of which the second
    # draft accepts min(.5, .4) + min(.5, .1) = .5: .6 + .4 * .5 = .8.
    def joint(table: Any, spec: Spec, chance: Branching) -> Any:
        tree = merge([original(d, d.spec, chance)[0] for d in TWO], True, 4).tree
        return tree, paths_of(tree)

    original = test_accept.draft
    monkeypatch.setattr(test_accept, "draft", joint)
    found = test_accept.committed(P, Spec(ONE))
    assert sum(w for tokens, w in found.items() if len(tokens) == 2) == pytest.approx(0.8, abs=1e-6)


# The merged tree itself


def tree(tokens: list[int], parents: list[int], drawn: Drawn | None = None) -> DraftTree:
    return DraftTree(torch.tensor([tokens]), TreeShape(torch.tensor([parents])), drawn)


def test_a_token_chosen_twice_is_one_node_with_the_children_of_both() -> None:
    one, two = tree([9, 1, 2], [-1, 0, 1]), tree([9, 1, 3, 4], [-1, 0, 1, 0])
    merged = merge([one, two], False, 10)
    assert merged.tree.tokens.tolist() == [[9, 1, 4, 2, 3]]
    assert merged.tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert merged.owners == [[-1, 0, 1, 0, 1]]
    assert merged.places == [[[0, 1, 3], [0, 1, 4, 2]]]
    assert merged.tree.drawn is None


def test_a_token_drawn_twice_stays_as_a_second_leaf_and_its_children_move_to_the_first() -> None:
    one = tree([9, 1], [-1, 0], Drawn(torch.full((1, 2, 10), 0.1)))
    two = tree([9, 1, 3], [-1, 0, 1], Drawn(torch.full((1, 3, 10), 0.1)))
    merged = merge([one, two], True, 10).tree
    assert merged.tokens.tolist() == [[9, 1, 1, 3]]
    assert merged.parents.tolist() == [[-1, 0, 0, 1]]
    assert merged.drawn is not None and merged.drawn.sources is not None
    assert merged.drawn.sources.tolist() == [[-1, 0, 2, 3]]


def test_a_token_chosen_where_it_was_drawn_stays_too_so_that_the_rule_does_not_depend_on_the_draw() -> None:
    one = tree([9, 1], [-1, 0], Drawn(torch.full((1, 2, 10), 0.1)))
    merged = merge([one, tree([9, 1, 3], [-1, 0, 1])], False, 10).tree
    assert merged.tokens.tolist() == [[9, 1, 1, 3]]
    assert merged.parents.tolist() == [[-1, 0, 0, 1]]
    assert merged.drawn is not None and merged.drawn.drawn is not None
    assert merged.drawn.drawn.tolist() == [[False, True, False, False]]


def test_rows_of_different_sizes_are_filled_with_nodes_that_are_not_real() -> None:
    one = DraftTree(torch.tensor([[9, 1], [8, 1]]), TreeShape.chain(1))
    two = DraftTree(torch.tensor([[9, 1], [8, 2]]), TreeShape.chain(1))
    merged = merge([one, two], False, 10).tree
    assert merged.tokens.tolist() == [[9, 1, 9], [8, 1, 2]]
    assert merged.real().tolist() == [[True, True, False], [True, True, True]]
    merged.check(torch.tensor([9, 8]), 10)


def test_drafts_that_draw_siblings_in_different_ways_are_refused() -> None:
    probs = torch.full((1, 2, 10), 0.1)
    one, two = (tree([9, 1], [-1, 0], Drawn(probs, None, flag)) for flag in (True, False))
    with pytest.raises(DraftTreeError, match="the same way"):
        merge([one, two], True, 10)
