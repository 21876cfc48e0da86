"""The best tree from per-depth marginals: judged by listing every path."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from selfspec.heads.best_first import best_first

torch.set_num_threads(1)


def marginals(batch: int, depths: int, ranks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, depths, ranks + 3, generator=generator)
    return logits.log_softmax(-1).sort(descending=True).values[..., :ranks]


def every_path(scores: Tensor) -> dict[tuple[int, ...], float]:
    depths, ranks = scores.shape
    return {
        path: sum(float(scores[d, r]) for d, r in enumerate(path))
        for depth in range(1, depths + 1)
        for path in itertools.product(range(ranks), repeat=depth)
    }


def paths_of(parents: Tensor, columns: Tensor) -> list[tuple[int, ...]]:
    """The path of ranks to each node but the root, given columns that are ranks."""
    paths: list[tuple[int, ...]] = [()]
    for parent, column in zip(parents[1:].tolist(), columns.tolist(), strict=True):
        paths.append((*paths[parent], column))
    return paths[1:]


@pytest.mark.parametrize("guesses", [1, 2, 5, 13, 39])
def test_no_tree_of_the_size_scores_higher(guesses: int) -> None:
    scores = marginals(3, 3, 3)
    columns, shape = best_first(scores, torch.arange(3).expand(3, 3, 3), guesses)
    for row in range(3):
        chances = every_path(scores[row])
        found = paths_of(shape.parents[row], columns[row])
        assert len(set(found)) == len(found) == guesses
        best = sorted((math.exp(score) for score in chances.values()), reverse=True)[:guesses]
        assert sum(math.exp(chances[path]) for path in found) == pytest.approx(sum(best))


def test_every_prefix_is_the_best_tree_of_its_size() -> None:
    scores, columns = marginals(1, 4, 4), torch.arange(4).expand(1, 4, 4)
    whole = best_first(scores, columns, 30)
    for guesses in range(1, 30):
        part = best_first(scores, columns, guesses)
        assert torch.equal(part[0], whole[0][:, :guesses])
        assert torch.equal(part[1].parents, whole[1].parents[:, : guesses + 1])


def test_columns_are_those_of_depth_and_rank() -> None:
    scores = marginals(2, 3, 4)
    ranks, shape = best_first(scores, torch.arange(4).expand(2, 3, 4), 20)
    ids = torch.randperm(24, generator=torch.Generator().manual_seed(0)).view(2, 3, 4)
    columns, _ = best_first(scores, ids, 20)
    depth = shape.depth[:, 1:]
    for row in range(2):
        assert torch.equal(columns[row], ids[row, depth[row] - 1, ranks[row]])


def test_one_rank_gives_a_chain() -> None:
    columns, shape = best_first(marginals(2, 5, 1), torch.arange(5).view(1, 5, 1).expand(2, 5, 1), 3)
    assert torch.equal(columns, torch.arange(3).expand(2, 3))
    assert torch.equal(shape.parents, torch.arange(-1, 3).expand(2, 4))


def test_rows_may_have_different_depths_and_sizes() -> None:
    scores = marginals(3, 3, 2)
    scores[1, :, 1] = -math.inf
    columns, shape = best_first(scores, torch.arange(2).expand(3, 3, 2), 9, depths=[3, 3, 0])
    assert shape.real is not None
    assert shape.real.sum(1).tolist() == [10, 4, 1]
    alone, alone_shape = best_first(scores[:1], torch.arange(2).expand(1, 3, 2), 9)
    assert torch.equal(columns[:1], alone) and torch.equal(shape.parents[:1], alone_shape.parents)
    assert paths_of(shape.parents[1][:4], columns[1][:3]) == [(0,), (0, 0), (0, 0, 0)]


def test_no_guesses_leave_the_root() -> None:
    columns, shape = best_first(marginals(2, 3, 2), torch.arange(2).expand(2, 3, 2), 4, depths=[0, 0])
    assert columns.shape == (2, 0) and shape.parents.tolist() == [[-1], [-1]]
