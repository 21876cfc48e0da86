"""Prompt lookup: which earlier places it finds, how it merges them, and that it never scans the whole text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.lookup import Lookup, LookupConfig, NgramHistory
from selfspec.tree import DraftTree


def propose(*texts: list[int], budget: Budget | None = None, **options: Any) -> DraftTree:
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    counts = torch.tensor([len(text) - 1 for text in texts])
    draft = Lookup(LookupConfig(**options))
    state = draft.begin(Verified(ids[:, :-1], ids[:, 1:], counts))
    return draft.propose(state, budget or Budget(), Sampling(), None)


def paths(tree: DraftTree, row: int = 0) -> list[list[int]]:
    """Tokens along each root-to-leaf path, the root left out."""
    return [[int(tree.tokens[row, node]) for node in path[1:]] for path in tree.shape.paths(row)]


def test_the_continuation_of_the_longest_match_comes_first() -> None:
    tree = propose([1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3], nodes=4, branches=1)
    assert paths(tree) == [[7, 7, 9]]


def test_of_equal_matches_the_newest_comes_first() -> None:
    tree = propose([5, 6, 1, 5, 6, 2, 9, 5, 6], nodes=3, branches=1)
    assert paths(tree) == [[2, 9]]


def test_continuations_merge_into_one_tree() -> None:
    tree = propose([5, 6, 1, 2, 5, 6, 1, 3, 4, 5, 6], nodes=6, branches=2, trunk=0.6)
    assert tree.tokens.tolist() == [[6, 1, 3, 4, 2, 5]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1, 4]]


def test_what_branches_leave_goes_to_the_trunk() -> None:
    tree = propose([5, 6, 1, 2, 3, 4, 8, 5, 6], nodes=6, branches=3, trunk=0.5)
    assert paths(tree) == [[1, 2, 3, 4, 8]]


def test_a_loop_is_continued_past_the_newest_token() -> None:
    tree = propose([9, 1, 2, 1, 2], nodes=7, branches=1)
    assert paths(tree) == [[1, 2, 1, 2, 1, 2]]


def test_no_match_gives_the_root_only() -> None:
    assert propose([1, 2, 3, 4]).nodes == 1
    assert propose([1, 2, 3, 1], min_ngram=2).nodes == 1
    assert propose([4] * 1 + [5]).nodes == 1


def test_budget_and_depth_are_kept() -> None:
    loop = [1, 2, 3, 1, 2, 4, 1, 2]
    assert propose(loop, budget=Budget(nodes=3)).nodes <= 3
    assert propose(loop, budget=Budget(depth=2)).shape.max_depth == 2
    assert propose(loop, budget=Budget(nodes=1)).nodes == 1


def test_rows_without_a_match_are_padded_with_unreal_nodes() -> None:
    tree = propose([1, 2, 3, 4, 1], [1, 2, 3, 4, 5], nodes=4)
    assert tree.real().tolist() == [[True] * 4, [True, False, False, False]]
    tree.check(torch.tensor([1, 5]), 97)


@pytest.mark.parametrize("seed", range(10))
def test_the_index_finds_what_a_scan_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(60)]
    history = NgramHistory(LookupConfig(max_ngram=3, min_ngram=2))
    for token in text:
        history.extend([token])
    expected: list[int] = []
    for length in (3, 2):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:] and end not in expected:
                expected.append(end)
    assert list(history.matches()) == expected


def test_a_new_token_costs_one_entry_per_length() -> None:
    history = NgramHistory(LookupConfig(max_ngram=3, min_ngram=1))
    history.extend(list(range(1000)) * 2)
    history.extend([0])
    assert [len(older) for older in history._older] == [0, 2001, 2001, 2001]


@pytest.mark.parametrize(
    "options",
    [{"max_ngram": 1, "min_ngram": 2}, {"min_ngram": 0}, {"nodes": 0}, {"branches": 0}, {"trunk": 0.0}],
    ids=str,
)
def test_impossible_configurations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LookupConfig(**options)
