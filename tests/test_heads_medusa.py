"""Medusa: which token each head learns and guesses, its trees, and the peer's own numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import golden
import pytest
import tiny
import torch
from torch import Tensor

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.layers import ResidualBlocks
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.target import Target
from selfspec.tree import shape_from_choices

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("llama")


def make(target: Target, **options: object) -> Medusa:
    head = Medusa.from_target(MedusaConfig(**options), target)
    assert isinstance(head, Medusa)
    return head


def speaking(target: Target, head: Medusa, ids: Tensor) -> Verified:
    """Features for which the output head names, at each place, that place's own next token."""
    rows = torch.nn.functional.normalize(head.output.rows, dim=-1)
    return Verified(ids[:, :-1], ids[:, 1:], torch.tensor([ids.shape[1] - 1]), 100 * rows[ids[:, 1:]])


@pytest.mark.parametrize("j", [0, 1, 2])
def test_head_j_at_place_p_has_label_p_plus_2_plus_j(target: Target, j: int) -> None:
    ids = torch.arange(10).unsqueeze(0)
    head = make(target, num_heads=3)
    with torch.no_grad():
        head.output.rows.copy_(torch.eye(97, 32))
    verified = speaking(target, head, ids)

    def shift(x: Tensor) -> Tensor:
        """Blocks that turn the feature naming token t into the one naming token t + 1 + j."""
        return torch.stack([x.roll(1 + n, -1) for n in range(3)])

    head.blocks.forward = shift  # type: ignore[method-assign]
    mask = torch.ones(1, 9, dtype=torch.bool)
    result = head.loss(verified, mask)
    assert torch.equal(result.correct, result.seen)
    assert result.seen.tolist() == [8.0, 7.0, 6.0]
    place = 4
    only = torch.zeros_like(mask)
    only[0, place + 1 + j] = True
    assert verified.next_tokens[only].tolist() == [int(ids[0, place + 2 + j])]
    assert head.loss(verified, only).correct[j] == 1
    tree = head.propose(head.begin(verified), Budget(), Sampling(), None)
    assert tree.tokens[0, next(path for path in tree.shape.paths() if len(path) == 4)].tolist() == [9, 10, 11, 12]


def test_fresh_heads_repeat_the_targets_own_next_token(target: Target) -> None:
    head = make(target, num_heads=2)
    ids = tiny.text(1, 12)
    output = target.features(ids, None, head.needs)
    assert output.hidden is not None
    root = target.model.lm_head(output.hidden[:, -1]).argmax(-1)
    verified = Verified(ids, torch.cat([ids[:, 1:], root[:, None]], 1), torch.tensor([12]), output.hidden)
    tree = head.propose(head.begin(verified), Budget(nodes=3), Sampling(), None)
    assert tree.tokens.tolist() == [[int(root)] * 3]


def test_later_heads_count_less(target: Target) -> None:
    ids = tiny.text(1, 12)
    single, double = (make(target, num_heads=2, head_decay=decay) for decay in (0.0, 0.5))
    output = target.features(ids[:, :-1], None, single.needs)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([11]), output.hidden)
    mask = torch.ones(1, 11, dtype=torch.bool)
    first, both = single.loss(verified, mask).loss, double.loss(verified, mask).loss
    assert first < both
    full = make(target, num_heads=2, head_decay=1.0).loss(verified, mask).loss
    torch.testing.assert_close(both - first, (full - first) / 2)


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ([[0], [0, 0], [0, 0, 0]], r"\(0, 0, 0\)"),
        ([[99]], r"\(99,\)"),
        ([[0], [0]], r"\(0,\)"),
        ([[1, 0]], r"\(1, 0\)"),
    ],
    ids=["too deep", "rank beyond vocabulary", "twice", "no parent"],
)
def test_trees_that_do_not_fit_are_refused_at_construction(
    target: Target, choices: list[list[int]], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make(target, num_heads=2, choices=choices)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tree": "dynamic"}, "'dynamic'.*'static' or 'best-first'"),
        ({"tree": "best-first", "choices": [[0]]}, "leave one out"),
        ({"tree": "best-first", "tree_nodes": 0}, "of 0 nodes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_trees_that_make_no_sense_are_refused(target: Target, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(target, **options)


@torch.no_grad()
def test_best_first_trees_hold_the_likeliest_paths_of_each_row(target: Target) -> None:
    """Judged by listing every path of the heads' own probabilities; rows differ in shape, and are as rows alone."""
    head = make(target, num_heads=3, tree="best-first", tree_nodes=9, tree_top_k=5)
    generator = torch.Generator().manual_seed(0)
    for parameter in head.blocks.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    ids = tiny.text(3, 12)
    output = target.features(ids[:, :-1], None, head.needs)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([11, 11, 11]), output.hidden)
    state = head.begin(verified)
    tree = head.propose(state, Budget(), Sampling(), None)
    chances = head.output(head.blocks(state.hidden)).softmax(-1).transpose(0, 1)
    for row in range(3):
        best = chances[row].topk(5)
        paths = [
            math.prod(float(best.values[depth, rank]) for depth, rank in enumerate(ranks))
            for depths in (1, 2, 3)
            for ranks in itertools.product(range(5), repeat=depths)
        ]
        lines = [ancestry(tree.parents[row].tolist(), node)[1:] for node in range(1, 9)]
        found = [
            math.prod(float(chances[row, depth, tree.tokens[row, node]]) for depth, node in enumerate(line))
            for line in lines
        ]
        assert sum(found) == pytest.approx(sum(sorted(paths, reverse=True)[:8]), rel=1e-5)
        alone = head.propose(state.select(torch.tensor([row])), Budget(), Sampling(), None)
        assert torch.equal(alone.tokens[0], tree.tokens[row])
    assert len({tuple(row) for row in tree.parents.tolist()}) > 1


def ancestry(parents: list[int], node: int) -> list[int]:
    """The root, then the nodes down to this one."""
    return [node] if parents[node] < 0 else [*ancestry(parents, parents[node]), node]


def test_a_budget_cuts_a_best_first_tree(target: Target) -> None:
    head = make(target, num_heads=3, tree="best-first")
    ids = tiny.text(1, 5)
    state = head.begin(Verified(ids[:, :-1], ids[:, 1:], torch.tensor([4]), torch.ones(1, 4, 32)))
    trees = [head.propose(state, budget, Sampling(), None) for budget in (Budget(nodes=5), Budget(nodes=7, depth=1))]
    assert [tree.nodes for tree in trees] == [5, 5]  # four tokens of a head are considered
    assert trees[1].parents.tolist() == [[-1, 0, 0, 0, 0]]
    assert head.propose(state, Budget(nodes=1), Sampling(), None).nodes == 1


def test_an_empty_tree_drafts_nothing(target: Target) -> None:
    head = make(target, num_heads=2, choices=[])
    ids = tiny.text(2, 5)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([4, 4]), torch.zeros(2, 4, 32))
    assert head.propose(head.begin(verified), Budget(), Sampling(), None).nodes == 1


def test_a_budget_cuts_the_static_tree(target: Target) -> None:
    head = make(target, num_heads=2, choices=[[0], [0, 0], [1], [0, 1]])
    ids = tiny.text(1, 5)
    state = head.begin(Verified(ids[:, :-1], ids[:, 1:], torch.tensor([4]), torch.ones(1, 4, 32)))
    parents = [
        head.propose(state, budget, Sampling(), None).parents.tolist()[0]
        for budget in (Budget(), Budget(nodes=3), Budget(depth=1), Budget(nodes=99))
    ]
    assert parents == [[-1, 0, 0, 1, 1], [-1, 0, 1], [-1, 0, 0], [-1, 0, 0, 1, 1]]


@torch.no_grad()
def test_peer_heads() -> None:
    path, vectors = golden.folder("medusa"), golden.tensors("medusa")
    weights = golden.weights(path / "draft" / "medusa_lm_head.pt")
    blocks = ResidualBlocks(5, 1, 64)
    for j in range(5):
        blocks.weight[0, j] = weights[f"{j}.0.linear.weight"]
        blocks.bias[0, j, 0] = weights[f"{j}.0.linear.bias"]
    moved = blocks(vectors["prefill.hidden_states"][0])
    for j in range(5):
        logits = moved[j] @ weights[f"{j}.1.weight"].float().T
        torch.testing.assert_close(logits, vectors["prefill.medusa_logits"][j, 0], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_7b_stage2", "chain4"])
def test_peer_trees(name: str) -> None:
    vectors, choices = golden.tensors("medusa"), golden.notes("medusa")["tree_choices"][name]
    shape, _ = shape_from_choices(choices)
    assert torch.equal(shape.ancestors[0], vectors[f"buffers.{name}.medusa_attn_mask"][0, 0].bool())
    assert torch.equal(shape.depth[0], vectors[f"buffers.{name}.medusa_position_ids"])


def test_an_output_matrix_per_head_starts_as_the_shared_one_and_learns_apart(target: Target) -> None:
    shared, apart = (make(target, num_heads=2, draft_vocab_size=40, output_per_head=own) for own in (False, True))
    for head in (shared, apart):
        head.output.set_vocab(torch.arange(5, 45))
    assert apart.output.rows.shape == (2, 40, 32)
    moved = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(apart.output(moved), shared.output(moved))
    torch.testing.assert_close(apart.output(moved[1], 1), shared.output(moved[1]))
    ids = tiny.text(1, 12)
    output = target.features(ids[:, :-1], None, apart.needs)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([11]), output.hidden)
    apart.loss(verified, torch.ones(1, 11, dtype=torch.bool)).loss.backward()
    grad = apart.output.rows.grad
    assert grad is not None and not torch.equal(grad[0], grad[1]) and bool((grad != 0).any(2).all())
