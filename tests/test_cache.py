"""The target's cache: after any mix of acceptance and roll-back it must be as if only the kept tokens had been read.

The judge is a fresh forward pass of transformers over the same tokens.
"""

from __future__ import annotations

import random

import pytest
import tiny
import torch
from torch import Tensor

from selfspec import cache as storage
from selfspec.cache import SlotCache
from selfspec.draft import Needs
from selfspec.hf import dynamic_cache
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape

TOLERANCE = 1e-5
FAMILIES = tiny.NAMES


def fresh(target: Target, tokens: list[int]) -> Tensor:
    """Logits after the last token, by transformers alone."""
    return target.model(torch.tensor([tokens])).logits[0, -1]


def prefilled(target: Target, prompts: list[list[int]], capacity: int = 256) -> SlotCache:
    cache = target.new_cache(len(prompts), capacity)
    longest = max(map(len, prompts))
    target.prefill(torch.tensor([p + [0] * (longest - len(p)) for p in prompts]), [*map(len, prompts)], cache, Needs())
    return cache


def prompt(length: int, seed: int = 1) -> list[int]:
    return tiny.text(1, length, seed)[0].tolist()


def worst(target: Target, tree: DraftTree, cache: SlotCache, past: list[list[int]]) -> float:
    """The largest error of a tree pass over all nodes of all rows."""
    logits = target.verify(tree, cache, Needs()).logits
    parents, found = tree.parents.expand_as(tree.tokens).tolist(), 0.0
    for row, tokens in enumerate(tree.tokens.tolist()):
        for node in range(tree.nodes):
            path = [node]
            while path[-1]:
                path.append(parents[row][path[-1]])
            text = past[row] + [tokens[n] for n in reversed(path)]
            found = max(found, float((logits[row, node] - fresh(target, text)).abs().max()))
    return found


#    0 - 1 - 2 - 3       accepting 0, 4, 7, 9 moves slots by different distances
#     \- 4 - 7 - 9
#      \ \-- 5
#       \ 6 - 8
TREE = TreeShape(torch.tensor([[-1, 0, 1, 2, 0, 4, 0, 4, 6, 7]]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_of_a_tree_sees_its_own_path(family: str, attention: str) -> None:
    target = tiny.selfspec_target(family, attention)
    past = [prompt(20)]
    cache = prefilled(target, past)
    assert worst(target, DraftTree(tiny.text(1, 10, seed=5), TREE), cache, past) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_accepted_nodes_into_place_past_the_window(family: str) -> None:
    target = tiny.selfspec_target(family)
    past = [prompt(20)]
    cache = prefilled(target, past)
    tree = DraftTree(tiny.text(1, 10, seed=5), TREE)
    target.verify(tree, cache, Needs())
    cache.keep([[0, 4, 7, 9]])
    past[0] += [int(tree.tokens[0, node]) for node in (0, 4, 7, 9)]
    assert cache.lengths == [24]
    assert worst(target, DraftTree(tiny.text(1, 10, seed=6), TREE), cache, past) < TOLERANCE


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_rejecting_all_leaves_no_trace_past_the_window(family: str) -> None:
    target = tiny.selfspec_target(family)
    past = [prompt(20)]
    cache = prefilled(target, past)
    for _ in range(3):
        junk = DraftTree(tiny.text(1, 5, seed=7), TreeShape.chain(4))
        target.verify(junk, cache, Needs())
        cache.keep([[0]])
        past[0].append(int(junk.tokens[0, 0]))
    assert worst(target, DraftTree(tiny.text(1, 3, seed=8), TreeShape.chain(2)), cache, past) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_many_rounds_of_mixed_acceptance_in_a_ragged_batch(family: str) -> None:
    target = tiny.selfspec_target(family)
    chance = random.Random(3)
    past = [prompt(n, seed=n) for n in (3, 20, 9)]
    cache = prefilled(target, past, capacity=24)
    for turn in range(16):
        nodes = chance.randint(1, 12)
        links = [[-1] + [chance.randrange(i) for i in range(1, nodes)] for _ in past]
        tree = DraftTree(tiny.text(3, nodes, seed=100 + turn), TreeShape(torch.tensor(links)))
        if turn % 5 == 4:
            assert worst(target, tree, cache, past) < TOLERANCE, turn
        else:
            target.verify(tree, cache, Needs())
        kept = []
        for row in range(3):
            leaf = chance.randrange(nodes)
            path = [leaf]
            while path[-1]:
                path.append(links[row][path[-1]])
            kept.append(path[::-1])
            past[row] += [int(tree.tokens[row, node]) for node in path[::-1]]
        cache.keep(kept)
        assert cache.lengths == [*map(len, past)]


def test_rows_dropped_from_the_batch_leave_the_others_as_they_were() -> None:
    target = tiny.selfspec_target("gemma3")
    past = [prompt(n, seed=n) for n in (12, 5, 17)]
    cache = prefilled(target, past)
    cache.select([0, 2])
    past = [past[0], past[2]]
    assert cache.lengths == [12, 17]
    assert worst(target, DraftTree(tiny.text(2, 10, seed=5), TREE), cache, past) < TOLERANCE
    cache.keep([[0, 1, 2], [0]])
    cache.select([1])
    assert cache.lengths == [18]


def test_keep_gathers_the_slots_of_each_row_and_touches_nothing_committed() -> None:
    cache = SlotCache([None, 4], 2, 16, torch.device("cpu"))
    ramp = torch.arange(2 * 16, dtype=torch.float32).reshape(2, 1, 16, 1)
    for layer in range(2):
        cache.update(ramp[:, :, :5], -ramp[:, :, :5], layer)
    cache.commit([5, 3])
    tree = 100 + ramp[:, :, :6]
    for layer in range(2):
        cache.update(tree, -tree, layer)
    cache.keep([[0, 2, 5], [0, 3]])
    assert cache.lengths == [8, 5]
    for layer in cache.layers:
        keys = layer.stored_keys[:, 0, :, 0].tolist()
        assert keys[0][:8] == [0, 1, 2, 3, 4, 100, 102, 105]
        assert keys[1][:5] == [16, 17, 18, 116, 119]
        assert torch.equal(layer.stored_values, -layer.stored_keys)


def test_storage_is_allocated_once_and_grows_by_doubling_when_it_must() -> None:
    cache = SlotCache([None], 1, 8, torch.device("cpu"))
    step, seen = torch.ones(1, 1, 1, 2), []
    for place in range(40):
        cache.update(step * place, step, 0)
        cache.commit([1])
        if cache.layers[0].stored_keys.data_ptr() not in seen:
            seen.append(cache.layers[0].stored_keys.data_ptr())
    assert len(seen) == 4, "8, 16, 32, 64 slots"
    assert cache.layers[0].stored_keys[0, 0, :40, 0].tolist() == list(range(40))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_spread_equals_a_cache_that_transformers_filled_itself(family: str) -> None:
    target = tiny.selfspec_target(family)
    past = [prompt(20)]
    cache = prefilled(target, past)
    tree = DraftTree(tiny.text(1, 10, seed=5), TREE)
    target.verify(tree, cache, Needs())
    cache.keep([[0, 4, 7]])
    past[0] += [int(tree.tokens[0, node]) for node in (0, 4, 7)]
    found = dynamic_cache(target.config, cache.spread([torch.arange(23)], 23))
    wanted = target.model(torch.tensor(past), use_cache=True).cache
    assert found.get_seq_length() == wanted.get_seq_length() == 23
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        assert type(mine) is type(theirs)
        assert mine.keys.shape == theirs.keys.shape
        assert torch.allclose(mine.keys, theirs.keys, atol=TOLERANCE)
        assert torch.allclose(mine.values, theirs.values, atol=TOLERANCE)
    step = torch.tensor([[11]])
    assert torch.allclose(
        target.model(step, cache=found).logits, target.model(step, cache=wanted).logits, atol=TOLERANCE
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_slots_written_by_rejected_nodes_cannot_leak(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage (as large as numbers go) in every slot behind the committed ones changes nothing."""
    target = tiny.selfspec_target(family, attention)
    past = [prompt(n, seed=n) for n in (4, 14)]
    cache = prefilled(target, past)
    for layer in cache.layers:
        for row, length in enumerate(cache.lengths):
            layer.stored_keys[row, :, length:] = 1e4
            layer.stored_values[row, :, length:] = 1e4
    assert worst(target, DraftTree(tiny.text(2, 10, seed=5), TREE), cache, past) < TOLERANCE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_fresh_memory_full_of_nan_cannot_leak(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(self: Tensor, *size: int, **kwargs: object) -> Tensor:
        return torch.full(size, float("nan"), dtype=self.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like, **kw: torch.full(like.shape, float("nan"), dtype=like.dtype))
    target = tiny.selfspec_target("gemma3", attention)
    past = [prompt(n, seed=n) for n in (4, 30)]
    cache = prefilled(target, past, capacity=8)
    assert worst(target, DraftTree(tiny.text(2, 10, seed=5), TREE), cache, past) < TOLERANCE


def test_padding_tokens_of_a_prefill_are_not_committed() -> None:
    target = tiny.selfspec_target("llama")
    cache = prefilled(target, [prompt(2), prompt(9)])
    assert cache.lengths == [2, 9]
    assert storage.SlotLayer.is_croppable is False
