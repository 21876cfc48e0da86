"""Draft trees: links, cuts, and the checks they must pass."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from selfspec.errors import ConfigError, DraftTreeError
from selfspec.tree import DraftTree, Drawn, TreeShape, shape_from_choices

#       0
#      / \
#     1   2
#    / \   \
#   3   4   5
#           |
#           6
PARENTS = [-1, 0, 0, 1, 1, 2, 5]
SHAPE = TreeShape(torch.tensor([PARENTS]))


def random_parents(seed: int, nodes: int) -> list[int]:
    chance = random.Random(seed)
    return [-1] + [chance.randrange(node) for node in range(1, nodes)]


def walk(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, by following links."""
    found = [node]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def test_ancestors_depth_and_paths_of_a_tree_drawn_by_hand() -> None:
    assert SHAPE.ancestors[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1, 1],
    ]
    assert SHAPE.depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert SHAPE.max_depth == 3
    assert SHAPE.paths() == [[0, 1, 3], [0, 1, 4], [0, 2, 5, 6]]


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 17, 64, 130])
def test_ancestors_of_random_trees_and_chains_agree_with_following_the_links(nodes: int) -> None:
    rows = [random_parents(seed, nodes) for seed in range(3)] + [list(range(-1, nodes - 1))]
    shape = TreeShape(torch.tensor(rows))
    for row, parents in enumerate(rows):
        for node in range(nodes):
            assert shape.ancestors[row, node].nonzero().flatten().tolist() == sorted(walk(parents, node))
            assert int(shape.depth[row, node]) == len(walk(parents, node)) - 1


def test_a_chain_is_a_chain_and_nothing_else_is() -> None:
    assert TreeShape.chain(0).is_chain and TreeShape.chain(5).is_chain
    assert TreeShape.chain(5).parents.tolist() == [[-1, 0, 1, 2, 3, 4]]
    assert not SHAPE.is_chain
    assert not TreeShape(torch.tensor([[-1, 0, 1]]), torch.tensor([[True, True, False]])).is_chain


def test_nodes_that_are_not_real_have_no_paths_and_no_depth() -> None:
    real = torch.tensor([[True, True, True, True, True, True, False], [True, True, False, False, True, False, False]])
    shape = TreeShape(torch.tensor([PARENTS, PARENTS]), real)
    assert shape.paths(0) == [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
    assert shape.paths(1) == [[0, 1, 4]]
    assert shape.max_depth == 2


def tree(shape: TreeShape = SHAPE, rows: int = 1, drawn: Drawn | None = None) -> DraftTree:
    return DraftTree(torch.arange(10, 10 + shape.nodes).expand(rows, -1).contiguous(), shape, drawn)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9])
def test_limit_depth_drops_the_deeper_nodes_and_nothing_else(depth: int) -> None:
    cut = tree().limit_depth(depth)
    kept = [i for i in range(7) if len(walk(PARENTS, i)) - 1 <= depth]
    assert cut.tokens.tolist() == [[10 + i for i in kept]]
    for new, old in enumerate(kept):
        links = [kept[i] for i in walk(cut.parents[0].tolist(), new)]
        assert links == walk(PARENTS, old)
    cut.check(torch.tensor([10]), 100)


@pytest.mark.parametrize("seed", range(5))
def test_limit_depth_of_rows_with_shapes_of_their_own(seed: int) -> None:
    nodes, rows = 12, [random_parents(10 * seed + row, 12) for row in range(3)]
    chance = torch.Generator().manual_seed(seed)
    real = torch.rand(3, nodes, generator=chance) < 0.8
    real[:, 0] = True
    for row, parents in enumerate(rows):
        for node in range(1, nodes):
            real[row, node] &= real[row, parents[node]]
    tokens = torch.randint(0, 50, (3, nodes), generator=chance)
    whole = DraftTree(tokens, TreeShape(torch.tensor(rows), real))
    for depth in range(5):
        cut = whole.limit_depth(depth)
        for row in range(3):
            wanted = [p for p in _texts(whole, row) if len(p) <= depth + 1]
            assert sorted(_texts(cut, row)) == sorted(wanted)


def _texts(tree: DraftTree, row: int) -> list[list[int]]:
    """Tokens on the way to each real node."""
    parents, tokens = tree.parents.expand_as(tree.tokens)[row].tolist(), tree.tokens[row].tolist()
    real = tree.real()[row].tolist()
    return [[tokens[i] for i in reversed(walk(parents, node))] for node in range(tree.nodes) if real[node]]


def test_limit_depth_keeps_distributions_with_their_nodes() -> None:
    probs = torch.arange(7.0).reshape(1, 7, 1).expand(1, 7, 4)
    flags = torch.tensor([[False, True, False, True, True, True, False]])
    ids = torch.tensor([4, 2, 9, 7])
    cut = tree(drawn=Drawn(probs, flags, False, ids)).limit_depth(1)
    assert cut.drawn is not None and cut.drawn.drawn is not None
    assert cut.drawn.probs[0, :, 0].tolist() == [0.0, 1.0, 2.0]
    assert cut.drawn.drawn.tolist() == [[False, True, False]]
    assert cut.drawn.with_replacement is False
    assert cut.drawn.token_ids is ids


def test_the_root_alone() -> None:
    root = DraftTree.root_only(torch.tensor([4, 5]))
    root.check(torch.tensor([4, 5]), 6)
    assert root.nodes == 1 and root.shape.max_depth == 0 and root.real().all()


GOOD_ROOT = torch.tensor([10])


def broken(parents: list[list[int]] | None = None, tokens: list[list[int]] | None = None) -> DraftTree:
    return DraftTree(
        torch.tensor([[10, 11, 12]] if tokens is None else tokens),
        TreeShape(torch.tensor([[-1, 0, 1]] if parents is None else parents)),
    )


MALFORMED: dict[str, tuple[DraftTree, str]] = {
    "child before parent": (broken([[-1, 2, 0]]), "parents must come before"),
    "own parent": (broken([[-1, 1, 0]]), "parents must come before"),
    "second root": (broken([[-1, 0, -1]]), "parents must come before"),
    "root with a parent": (broken([[0, 0, 1]]), "root"),
    "too few links": (broken([[-1, 0]]), "parents have shape"),
    "links of too many rows": (broken([[-1, 0, 1], [-1, 0, 0]]), "parents have shape"),
    "another root": (broken(tokens=[[9, 11, 12]]), r"node 0 is \[9\], wanted the last token \[10\]"),
    "token above the vocabulary": (broken(tokens=[[10, 11, 20]]), r"0\.\.19, got \[20\]"),
    "token below zero": (broken(tokens=[[10, -1, 12]]), r"0\.\.19, got \[-1\]"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees_are_refused(name: str) -> None:
    bad, message = MALFORMED[name]
    with pytest.raises(DraftTreeError, match=message):
        bad.check(GOOD_ROOT, 20)


def _with_real(real: Tensor, tokens: list[list[int]] | None = None) -> DraftTree:
    return DraftTree(
        torch.tensor([[10, 11, 12]] if tokens is None else tokens), TreeShape(torch.tensor([[-1, 0, 1]]), real)
    )


def test_a_root_that_is_not_real_is_refused() -> None:
    with pytest.raises(DraftTreeError, match="root"):
        _with_real(torch.tensor([[False, True, True]])).check(GOOD_ROOT, 20)


def test_flags_of_another_shape_are_refused() -> None:
    with pytest.raises(DraftTreeError, match="real"):
        _with_real(torch.tensor([[True, True]])).check(GOOD_ROOT, 20)


def test_distributions_of_another_shape_are_refused() -> None:
    with pytest.raises(DraftTreeError, match="draft distributions"):
        DraftTree(torch.tensor([[10, 11]]), TreeShape.chain(1), Drawn(torch.ones(1, 1, 20) / 20)).check(GOOD_ROOT, 20)
    with pytest.raises(DraftTreeError, match="draft distributions"):
        DraftTree(torch.tensor([[10, 11]]), TreeShape.chain(1), Drawn(torch.ones(1, 2, 7) / 7)).check(GOOD_ROOT, 20)


def test_tokens_of_nodes_that_are_not_real_may_be_anything_that_can_be_embedded() -> None:
    _with_real(torch.tensor([[True, True, False]]), [[10, 11, 19]]).check(GOOD_ROOT, 20)
    with pytest.raises(DraftTreeError, match="tokens must lie in"):
        _with_real(torch.tensor([[True, True, False]]), [[10, 11, -1]]).check(GOOD_ROOT, 20)


def test_choices_become_a_tree_in_order_of_depth() -> None:
    shape, paths = shape_from_choices([(1,), (0, 0), (0,), (0, 0, 2), (1, 0)])
    assert paths == [(), (0,), (1,), (0, 0), (1, 0), (0, 0, 2)]
    assert shape.parents.tolist() == [[-1, 0, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (0,)], r"path \(0,\).*more than once"),
        ([(0,), (1, 0)], r"path \(1, 0\).*no parent; add \(1,\)"),
        ([(0,), (0, -1)], r"path \(0, -1\).*negative"),
        ([()], r"empty path"),
    ],
)
def test_choices_that_are_no_tree_are_refused_by_path(choices: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_choices(choices)


def test_no_choices_are_the_root_alone() -> None:
    shape, paths = shape_from_choices([])
    assert shape.nodes == 1 and paths == [()]
