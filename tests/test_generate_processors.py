"""Logits processors act on every token of a run as they do in plain decoding."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, knows
from oracle import Oracle, patched, plain
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

# Logits processors

LISTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 11]]},
    {"suppress_tokens": [3, 4, 5]},
    {"forced_eos_token_id": 9},
    {"begin_suppress_tokens": [3, 4]},
    {"renormalize_logits": True, "repetition_penalty": 1.3},
    {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 7 + k) % 97 for k in range(9)]},
]


@pytest.mark.parametrize("given", LISTS, ids=lambda g: next(iter(g)))
def test_processors_see_the_path_of_each_node(given: dict[str, Any], model: PreTrainedModel, prompt: Tensor) -> None:
    wanted = plain(model, prompt, max_new_tokens=NEW, **given)
    for make in (oracle.chain(6), oracle.bushy(4, 3)):
        with patched(model, Oracle(wanted.tolist(), make)):
            assert torch.equal(model.generate(prompt, max_new_tokens=NEW, **given), wanted)
            assert model.speculation.last.tokens_per_round > 3


class Penalty(LogitsProcessor):
    """A frequency penalty of the user's own: depends on how often each token stands in the row."""

    row_independent = True

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += input_ids.tolist()
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - 0.9 * counts


def test_a_users_processor_sees_every_committed_prefix_once_in_order(model: PreTrainedModel, prompt: Tensor) -> None:
    theirs, mine = Penalty(), Penalty()
    wanted = plain(model, prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([theirs]))
    for make in (oracle.chain(5), oracle.bushy(3, 3), oracle.random_trees(1, 9, 0.6)):
        mine.seen.clear()
        with patched(model, Oracle(wanted.tolist(), make)):
            found = model.generate(prompt, max_new_tokens=NEW, logits_processor=LogitsProcessorList([mine]))
        assert torch.equal(found, wanted)
        assert mine.seen == theirs.seen


def test_rows_with_drafts_of_different_lengths_keep_their_own_counts(model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (6, 9, 4)])
    given = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    free = plain(model, ids, logits_processor=LogitsProcessorList([Penalty()]), **given)[:, ids.shape[1] :]
    given |= {"eos_token_id": int(free[1, 3]), "min_new_tokens": 4}
    wanted = plain(model, ids, logits_processor=LogitsProcessorList([Penalty()]), **given)

    def make(root: int, truth: list[int], row: int, turn: int) -> oracle.Guess:
        return oracle.chain((0, 2, 5)[(row + turn) % 3])(root, truth, row, turn)

    with patched(model, Oracle(oracle.unpadded(wanted, mask), make)):
        found = model.generate(ids, logits_processor=LogitsProcessorList([Penalty()]), **given)
    assert torch.equal(found, wanted)


class Ban(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), float("-inf"))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["chain", "tree", "drawn", "lookup", "nothing"])
def test_a_banned_token_never_appears_whatever_the_draft(
    kind: str, sample: bool, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    banned = reference[1]
    flat = torch.full((tiny.VOCAB, tiny.VOCAB), 1 / tiny.VOCAB)
    drafts: dict[str, Any] = {
        "chain": knows(model, prompt),
        "tree": knows(model, prompt, make=oracle.bushy(3, 3)),
        "drawn": oracle.DrawnTree(flat, (5, 2), False),
        "lookup": "lookup",
        "nothing": Oracle([[0]], oracle.chain(0)),
    }
    torch.manual_seed(0)
    with patched(model, drafts[kind]):
        found = model.generate(
            prompt, max_new_tokens=NEW, do_sample=sample, logits_processor=LogitsProcessorList([Ban(banned)])
        )
    assert found.shape[1] == prompt.shape[1] + NEW
    assert banned not in found[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "given",
    [{"top_k": 1}, {"min_p": 0.999}, {"epsilon_cutoff": 0.3, "top_k": 1}, {"temperature": 1e-4}, {"typical_p": 1e-3}],
    ids=str,
)
def test_warpers_act_on_every_token_of_a_run(given: dict[str, Any], model: PreTrainedModel, prompt: Tensor) -> None:
    """Warpers that leave one token make sampling deterministic, at every place of a run."""
    torch.manual_seed(0)
    wanted = plain(model, prompt, max_new_tokens=NEW, do_sample=True, **given)
    with patched(model, Oracle(wanted.tolist(), oracle.chain(4))):
        assert torch.equal(model.generate(prompt, max_new_tokens=NEW, do_sample=True, **given), wanted)
        assert model.speculation.last.tokens_per_round > 4
