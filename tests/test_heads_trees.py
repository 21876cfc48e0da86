"""Static trees, their budgets, and trees grown by confidence, with masks drawn as rows of 0 and 1."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from selfspec.errors import ConfigError
from selfspec.heads.trees import (
    CandidatePool,
    StaticPlan,
    StaticTree,
    best_choices,
    check_choices,
    cut_choices,
    default_choices,
)
from selfspec.tree import TreeShape, shape_from_choices


def drawn(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_ancestors_of_a_static_tree() -> None:
    shape, paths = shape_from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    assert paths == [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    expected = drawn(
        "1000000",
        "1100000",
        "1010000",
        "1101000",
        "1100100",
        "1010010",
        "1101001",
    )
    assert torch.equal(shape.ancestors[0], expected)
    assert shape.depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]


def test_best_choices_beat_every_other_tree_of_their_size() -> None:
    table = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]]
    everything = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]

    def worth(tree: tuple[tuple[int, ...], ...]) -> float:
        return sum(table[0][p[0]] * (table[1][p[1]] if len(p) > 1 else 1) for p in tree)

    def closed(tree: tuple[tuple[int, ...], ...]) -> bool:
        return all(len(p) == 1 or p[:1] in tree for p in tree)

    for size in range(1, 6):
        chosen = best_choices(table, size)
        best = max(worth(t) for t in itertools.combinations(everything, size) if closed(t))
        assert closed(tuple(chosen)) and worth(tuple(chosen)) == pytest.approx(best)


def test_best_choices_of_one_rank_are_a_chain_and_stop_at_the_last_head() -> None:
    assert best_choices([[1.0], [1.0], [1.0]], 2) == [(0,), (0, 0)]
    assert best_choices([[1.0], [1.0], [1.0]], 9) == [(0,), (0, 0), (0, 0, 0)]
    assert best_choices([], 9) == []


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_default_trees_are_small_and_fit_their_heads(heads: int) -> None:
    choices = default_choices(heads)
    check_choices(choices, heads, 8)
    assert 4 <= len(choices) <= 15
    assert all(path[:-1] in {(), *choices[:index]} for index, path in enumerate(choices))


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([(0,), (0, 0), (0, 0, 0)], r"\(0, 0, 0\)"),
        ([(0,), (8,)], r"\(8,\)"),
        ([(0,), (0,)], r"\(0,\)"),
        ([(0,), (1, 0)], r"\(1, 0\)"),
        ([(0,), (-1,)], r"\(-1,\)"),
    ],
    ids=["too deep", "rank too high", "twice", "no parent", "negative"],
)
def test_choices_that_do_not_fit_are_refused_by_name(choices: list[tuple[int, ...]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_choices(choices, heads=2, ranks=8)


def test_no_choices_are_fine() -> None:
    check_choices([], heads=2, ranks=8)


def test_a_smaller_budget_keeps_the_first_choices_and_their_parents() -> None:
    choices = [(0,), (1, 0), (0, 0), (1,), (2,)]
    assert cut_choices(choices, 2, 9) == [(0,), (0, 0)]
    assert cut_choices(choices, 4, 9) == [(0,), (0, 0), (1,), (1, 0)]
    assert cut_choices(choices, 9, 1) == [(0,), (1,), (2,)]


def logits_of(*rows: list[float]) -> Tensor:
    """Log-probabilities as logits, `[1, rows, Q]`; the last column takes what is left."""
    return torch.tensor([[*row, 1 - sum(row)] for row in rows]).log().unsqueeze(0)


def test_a_grown_tree_by_hand() -> None:
    pool = CandidatePool(1, 2, torch.device("cpu"))
    beam, origin = pool.grow(logits_of([0.6, 0.3, 0.05]))
    assert (beam.tolist(), origin.tolist()) == ([[0, 1]], [[0, 0]])
    beam, origin = pool.grow(logits_of([0.5, 0.1, 0.3], [0.1, 0.8, 0.05]))
    # 0.6 * 0.5 = 0.30, 0.6 * 0.3 = 0.18, 0.3 * 0.8 = 0.24, 0.3 * 0.1 = 0.03
    assert (beam.tolist(), origin.tolist()) == ([[0, 1]], [[0, 1]])
    columns, shape = pool.best(4)
    assert columns.tolist() == [[0, 1, 0, 1]]
    assert shape.parents.tolist() == [[-1, 0, 0, 1, 2]]
    expected = drawn(
        "10000",
        "11000",
        "10100",
        "11010",
        "10101",
    )
    assert torch.equal(shape.ancestors[0], expected)


def test_rows_of_a_batch_grow_trees_of_their_own() -> None:
    pool = CandidatePool(2, 2, torch.device("cpu"))
    pool.grow(torch.cat([logits_of([0.9, 0.05, 0.01]), logits_of([0.45, 0.44, 0.01])]))
    pool.grow(torch.cat([logits_of([0.9, 0.05, 0.01], [0.5, 0.3, 0.1]), logits_of([0.5, 0.3, 0.1], [0.5, 0.3, 0.1])]))
    columns, shape = pool.best(2)
    assert columns.tolist() == [[0, 0], [0, 1]]
    assert shape.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]


def test_equal_scores_keep_parents_and_go_to_the_earlier_entry() -> None:
    certain = torch.full((1, 1, 5), -torch.inf)
    certain[..., 2] = 0.0
    pool = CandidatePool(1, 3, torch.device("cpu"))
    pool.grow(certain)
    pool.grow(certain.expand(1, 3, 5))
    columns, shape = pool.best(2)
    assert shape.parents.tolist() == [[-1, 0, 1]]
    assert columns.tolist() == [[2, 2]]


@pytest.mark.parametrize("seed", range(20))
def test_parents_of_chosen_nodes_are_chosen(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = CandidatePool(3, 4, torch.device("cpu"))
    pool.grow(torch.randint(0, 3, (3, 1, 9), generator=generator))
    for _ in range(3):
        pool.grow(torch.randint(0, 3, (3, 4, 9), generator=generator))
    columns, shape = pool.best(11)
    assert isinstance(shape, TreeShape) and columns.shape == (3, 11)
    assert bool((shape.parents[:, 1:] < torch.arange(1, 12)).all()) and bool((shape.parents[:, 1:] >= 0).all())
    assert shape.max_depth <= 4


@pytest.mark.parametrize("seed", range(20))
def test_a_settled_tree_would_not_change_with_more_levels(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = CandidatePool(1, 4, torch.device("cpu"))
    pool.grow(3 * torch.randn(1, 1, 9, generator=generator))
    settled: list[tuple[Tensor, Tensor]] = []
    for _ in range(6):
        pool.grow(torch.randn(1, 4, 9, generator=generator))
        if settled or pool.settled(6):
            columns, shape = pool.best(6)
            settled.append((columns, shape.parents))
    assert len(settled) > 1
    assert all(torch.equal(a, settled[0][0]) and torch.equal(b, settled[0][1]) for a, b in settled)


def test_a_static_tree_takes_each_rank_from_its_own_parents_logits() -> None:
    """By brute force: every node's token is the rank-c choice of a table that depends on its whole path."""
    choices = [(0,), (2,), (0, 1), (2, 0), (2, 2), (2, 2, 1), (0, 1, 0), (0, 1, 0, 3)]
    table: dict[tuple[int, ...], Tensor] = {}

    def logits(path: tuple[int, ...]) -> Tensor:
        seed = sum((token + 1) * 11**place for place, token in enumerate(path))
        return table.setdefault(path, torch.randn(9, generator=torch.Generator().manual_seed(seed)))

    tree = StaticTree(StaticPlan(choices, torch.device("cpu")))
    beam: list[tuple[int, ...]] = [()]
    while not tree.done:
        columns, origin = tree.grow(torch.stack([logits(path) for path in beam]).unsqueeze(0))
        beam = [(*beam[slot], token) for token, slot in zip(columns[0].tolist(), origin[0].tolist(), strict=True)]
    columns, shape = tree.finish()
    wanted = {}
    for choice in choices:
        path: tuple[int, ...] = ()
        for rank in choice:
            path = (*path, int(logits(path).topk(rank + 1).indices[rank]))
        wanted[choice] = path[-1]
    _, paths = shape_from_choices(choices)
    assert columns[0].tolist() == [wanted[path] for path in paths[1:]]
    assert torch.equal(shape.parents, shape_from_choices(choices)[0].parents)
    assert not beam
