"""Rows of a batch do not feel each other; trees are cut to the budget; memory stays flat."""

from __future__ import annotations

import gc
import random
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import tensors_alive
from oracle import Oracle, patched, plain
from transformers import PreTrainedModel

from selfspec.tree import DraftTree, Drawn, TreeShape


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [2, 7, 16])
def test_each_row_equals_its_own_batch_of_one_whatever_the_others_accept(batch: int, name: str) -> None:
    own, chance = tiny.model(name), random.Random(batch)
    prompts = [tiny.text(1, chance.randint(2, 20), seed=row)[0].tolist() for row in range(batch)]
    alone = [plain(own, torch.tensor([p]), max_new_tokens=26)[0].tolist() for p in prompts]
    ids, mask = oracle.left_padded(prompts)
    ends = {row: alone[row][len(prompts[row]) + chance.randint(1, 20)] for row in range(0, batch, 3)}
    # Row 0 is never right, row 1 always, the others by their own pattern.
    pattern = [[0] * 40, [8] * 40] + [[chance.choice((0, 0, 1, 3, 8)) for _ in range(40)] for _ in range(batch)]
    draft = Oracle(alone, oracle.chain(8, lambda row, turn: pattern[row][turn % 40]))
    with patched(own, draft):
        found = own.generate(
            ids, attention_mask=mask, max_new_tokens=26, eos_token_id=sorted(set(ends.values())), pad_token_id=0
        )
    for row, prompt in enumerate(prompts):
        new = alone[row][len(prompt) :]
        stop = next((i + 1 for i, token in enumerate(new) if token in ends.values()), len(new))
        mine = found[row, ids.shape[1] :].tolist()
        assert mine[:stop] == new[:stop] and not any(mine[stop:]), row


def test_memory_is_flat_over_20_calls(model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (4, 9)])
    counts = []
    with patched(model, "lookup"):
        for turn in range(20):
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=6,
                return_dict_in_generate=True,
                output_scores=True,
                do_sample=turn % 2 == 1,
                pad_token_id=0,
            )
            del out
            if turn in (4, 11, 19):
                counts.append(tensors_alive())
    assert max(counts[1:]) <= counts[0], counts


@pytest.mark.nightly
def test_one_call_of_4000_tokens_keeps_only_its_cache() -> None:
    own, prompt = tiny.model("llama"), tiny.text(1, 12)
    own.config.max_position_embeddings = 8192
    counts: list[tuple[int, int]] = []

    class Watch(oracle.Scripted):
        def tree(self, state: Any, budget: Any, generator: Any) -> DraftTree:
            if state.round % 400 == 399:
                gc.collect()
                alive = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
                counts.append((len(alive), sum(t.untyped_storage().nbytes() for t in alive)))
            return oracle.as_tree([oracle.chain(2)(tokens[-1], [], 0, 0) for tokens in state.tokens])

    with patched(own, Watch()):
        assert own.generate(prompt, max_new_tokens=4000).shape[1] == 4012
    assert len(counts) >= 8
    numbers, sizes = zip(*counts, strict=True)
    assert max(numbers[1:]) <= numbers[1] + 5 and max(sizes[1:]) <= 1.02 * sizes[1], counts


def test_a_users_own_tree_is_cut_to_the_budget(model: PreTrainedModel) -> None:
    prompt = tiny.text(1, 9)
    wanted = plain(model, prompt, max_new_tokens=20)
    widths: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda m, a, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    with patched(model, Oracle(wanted.tolist(), oracle.bushy(6, 3)), nodes=8):
        assert torch.equal(model.generate(prompt, max_new_tokens=20), wanted)
    handle.remove()
    assert max(widths[1:]) == 8


def test_drawn_nodes_are_cut_by_levels_whatever_order_they_are_numbered_in() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])
    tokens = torch.arange(7).unsqueeze(0)
    drawn = DraftTree(tokens, TreeShape(parents), Drawn(torch.full((1, 7, 9), 1 / 9)))
    chosen = DraftTree(tokens, TreeShape(parents))
    kept = {n: drawn.limit_nodes(n).tokens[0].tolist() for n in (1, 2, 3, 5, 6, 7)}
    assert kept == {1: [0], 2: [0, 1], 3: [0, 1, 2], 5: [0, 1, 2], 6: [0, 1, 2, 3, 4, 5], 7: list(range(7))}
    assert [chosen.limit_nodes(n).tokens[0].tolist() for n in (1, 4)] == [[0], [0, 1, 2, 3]]
    for n in range(1, 8):
        for tree in (drawn.limit_nodes(n), chosen.limit_nodes(n)):
            tree.check(torch.tensor([0]), 9)
            assert tree.nodes <= n


def test_a_cut_by_the_budget_leaves_the_distribution_alone() -> None:
    """The second token, the first that a draft can reach: 4,000 samples against its exact distribution."""
    own, prompt = tiny.model("llama"), tiny.text(1, 5)
    with torch.no_grad():
        first = own(prompt).logits[0, -1].softmax(-1)
        after = torch.cat([prompt.expand(tiny.VOCAB, -1), torch.arange(tiny.VOCAB).unsqueeze(1)], 1)
        p = first @ own(after).logits[:, -1].softmax(-1)
    table = (3 * torch.rand(tiny.VOCAB, tiny.VOCAB, generator=torch.Generator().manual_seed(2))).softmax(-1)
    generator, counts = torch.Generator().manual_seed(3), torch.zeros(tiny.VOCAB)
    with patched(own, oracle.DrawnTree(table, (4, 2), False), nodes=3):
        for _ in range(8):
            found = own.generate(prompt.repeat(500, 1), do_sample=True, top_k=0, max_new_tokens=3, generator=generator)
            counts += torch.bincount(found[:, prompt.shape[1] + 1], minlength=tiny.VOCAB)
    expected = p * counts.sum()
    big = expected >= 5
    chi = float((((counts - expected) ** 2) / expected)[big].sum())
    degrees = int(big.sum())
    assert chi < degrees + 5 * (2 * degrees) ** 0.5, (chi, degrees)
