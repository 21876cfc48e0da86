"""Masks and positions of a tree pass, against rows of 0 and 1 written by hand and against a slow definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import torch

from selfspec.cache import Slots
from selfspec.draft import Needs
from selfspec.errors import UnsupportedModel
from selfspec.masks import as_attention_mask, tree_positions, visible
from selfspec.tree import DraftTree, TreeShape

#   0 - 1 - 3
#    \
#     2
SHAPE = TreeShape(torch.tensor([[-1, 0, 0, 1]]))


def slots(*lengths: int) -> Slots:
    made = Slots(len(lengths), 64, torch.device("cpu"))
    made.advance(lengths)
    return made


def rows(text: str) -> list[list[int]]:
    return [[int(c) for c in line.replace(" ", "")] for line in text.strip().splitlines()]


def test_one_row_without_a_window() -> None:
    seen = visible(SHAPE, slots(3), None)
    assert seen[0].int().tolist() == rows(
        """
        111 1000
        111 1100
        111 1010
        111 1101
        """
    )


def test_one_row_with_a_window_of_four() -> None:
    # Five committed tokens, the root at position 5. A pass can see back to position 2.
    # Node 3 stands at position 7 and sees positions 4..7; nodes 1 and 2 stand at 6 and see 3..6.
    assert slots(5).view(4, 4) == (2, 9)
    seen = visible(SHAPE, slots(5), 4)
    assert seen[0].int().tolist() == rows(
        """
        111 1000
        011 1100
        011 1010
        001 1101
        """
    )


def test_a_window_smaller_than_the_tree_hides_ancestors_too() -> None:
    seen = visible(TreeShape.chain(4), slots(3), 2)
    assert seen[0].int().tolist() == rows(
        """
        1 10000
        0 11000
        0 01100
        0 00110
        0 00011
        """
    )


def test_rows_of_different_lengths_share_a_view() -> None:
    # Row 0 has 2 committed tokens and its nodes in slots 2..5, row 1 has 4 and its nodes in slots 4..7.
    seen = visible(SHAPE, slots(2, 4), None)
    assert seen[0].int().tolist() == rows(
        """
        11 1000 00
        11 1100 00
        11 1010 00
        11 1101 00
        """
    )
    assert seen[1].int().tolist() == rows(
        """
        1111 1000
        1111 1100
        1111 1010
        1111 1101
        """
    )


def test_rows_of_different_lengths_with_a_window_of_three() -> None:
    assert slots(4, 6).view(3, 4) == (2, 10)
    seen = visible(SHAPE, slots(4, 6), 3)
    assert seen[0].int().tolist() == rows(
        """
        11 1000 00
        01 1100 00
        01 1010 00
        00 1101 00
        """
    )
    assert seen[1].int().tolist() == rows(
        """
        0011 1000
        0001 1100
        0001 1010
        0000 1101
        """
    )


def test_rows_with_shapes_of_their_own() -> None:
    shape = TreeShape(torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    seen = visible(shape, slots(1, 1), None)
    assert seen[0].int().tolist() == rows("1 100\n1 110\n1 111")
    assert seen[1].int().tolist() == rows("1 100\n1 110\n1 101")


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 100])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_agree_with_a_definition_node_by_node(seed: int, window: int | None) -> None:
    chance = random.Random(seed)
    nodes, batch = chance.randint(1, 12), chance.randint(1, 4)
    own = chance.random() < 0.5 and batch > 1
    links = [[-1] + [chance.randrange(i) for i in range(1, nodes)] for _ in range(batch if own else 1)]
    lengths = [chance.randint(1, 12)] * batch if seed % 2 else [chance.randint(1, 12) for _ in range(batch)]
    at = slots(*lengths)
    first, end = at.view(window, nodes)
    seen = visible(TreeShape(torch.tensor(links)), at, window).expand(batch, -1, -1)
    for row in range(batch):
        parents = links[row if own else 0]
        for node in range(nodes):
            path = [node]
            while path[-1]:
                path.append(parents[path[-1]])
            position = lengths[row] + len(path) - 1
            place = {slot: slot for slot in range(lengths[row])}
            place |= {lengths[row] + n: position - up for up, n in enumerate(path)}
            wanted = {slot for slot, p in place.items() if window is None or position - p < window}
            assert {first + s for s in seen[row, node].nonzero().flatten().tolist()} == wanted
            assert min(wanted) >= first and max(wanted) < end


def test_positions_are_committed_length_plus_depth() -> None:
    assert tree_positions(SHAPE, slots(3)).tolist() == [[3, 4, 4, 5]]
    assert tree_positions(SHAPE, slots(2, 7)).tolist() == [[2, 3, 3, 4], [7, 8, 8, 9]]


def test_the_model_is_given_these_positions() -> None:
    target = tiny.selfspec_target("llama")
    cache = target.new_cache(1, 32)
    target.prefill(tiny.text(1, 5), [5], cache, Needs())
    given: list[Any] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is cache:
            given.append(kwargs["position_ids"].tolist())

    target.model.model.register_forward_pre_hook(note, with_kwargs=True)
    target.verify(DraftTree(torch.tensor([[4, 5, 6, 7]]), SHAPE), cache, Needs())
    assert given == [[[5, 6, 6, 7]]]


def test_sdpa_takes_booleans_and_eager_takes_numbers_to_add() -> None:
    seen = visible(SHAPE, slots(3), None)
    boolean = as_attention_mask(seen, "sdpa", torch.float32)
    assert boolean.dtype is torch.bool and boolean.shape == (1, 1, 4, 7)
    added = as_attention_mask(seen, "eager", torch.bfloat16)
    assert added.dtype is torch.bfloat16
    assert torch.equal(added == 0, seen.unsqueeze(1))
    assert float(added.float().min()) == torch.finfo(torch.bfloat16).min


def test_an_attention_back_end_without_masks_is_refused_even_after_loading() -> None:
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        as_attention_mask(visible(SHAPE, slots(3), None), "flex_attention", torch.float32)
