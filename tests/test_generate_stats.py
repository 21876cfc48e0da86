"""Statistics count what they say."""

from __future__ import annotations

from typing import Any

import oracle
import tiny
import torch
from generate_tools import NEW, knows
from oracle import patched
from torch import Tensor
from transformers import (
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

# Statistics


class StopAt(StoppingCriteria):
    """Stops at a length. Nothing can be read off it beforehand, unlike a limit on the length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_counts_of_a_scripted_generation(model: PreTrainedModel, prompt: Tensor) -> None:
    accepts = [3, 0, 5, 1]
    stop = StoppingCriteriaList([StopAt(prompt.shape[1] + 1 + 13)])
    with patched(model, knows(model, prompt, make=oracle.chain(5, lambda row, turn: accepts[turn]))):
        model.generate(prompt, max_new_tokens=NEW, stopping_criteria=stop)
        stats = model.speculation.last
    assert (stats.rounds, stats.proposed, stats.accepted, stats.committed) == (4, 20, 9, 13)
    assert stats.new_tokens == 14
    assert stats.tokens_per_round == 13 / 4
    assert stats.accepted_per_round == 9 / 4
    assert stats.accepted_by_depth == [3 / 4, 2 / 4, 2 / 4, 1 / 4, 1 / 4]
    assert stats.conditional_by_depth == [3 / 4, 2 / 3, 2 / 2, 1 / 2, 1 / 1]


def test_tokens_after_a_stop_are_not_counted(model: PreTrainedModel, prompt: Tensor, reference: list[int]) -> None:
    # The prefill gives token 0, the round 1..9, of which the text keeps 1..3.
    assert reference[3] not in reference[:3]
    with patched(model, knows(model, prompt, make=oracle.chain(8))):
        found = model.generate(prompt, max_new_tokens=NEW, eos_token_id=reference[3], pad_token_id=0)
        stats = model.speculation.last
    assert found.shape[1] - prompt.shape[1] == stats.new_tokens == 4
    assert (stats.rounds, stats.committed, stats.accepted, stats.proposed) == (1, 3, 3, 8)


def test_a_round_cut_by_the_length_limit_proposes_no_more_than_it_could_commit(
    model: PreTrainedModel, prompt: Tensor
) -> None:
    with patched(model, knows(model, prompt, make=oracle.chain(8))):
        model.generate(prompt, max_new_tokens=4)
        stats = model.speculation.last
    assert (stats.rounds, stats.proposed, stats.accepted, stats.committed) == (1, 2, 2, 3)


def test_each_row_counts_the_depth_of_its_own_tree(model: PreTrainedModel) -> None:
    ids = tiny.text(2, 8)

    def make(root: int, truth: list[int], row: int, turn: int) -> oracle.Guess:
        return oracle.chain(1 if row == 0 else 4)(root, truth, row, turn)

    with patched(model, knows(model, ids, make=make)):
        model.generate(ids, max_new_tokens=11)
        stats = model.speculation.last
    # Row 1 commits 5 + 5 tokens in two rounds; row 0 two at a time, in five. Every guess is right.
    assert stats.rounds == 7
    assert stats.proposed == stats.accepted == 2 * 4 + 5 * 1
    assert stats.reached == [7, 2, 2, 2]
    assert stats.conditional_by_depth == [1.0, 1.0, 1.0, 1.0]


def test_the_report_adds_up_calls_and_can_be_reset(model: PreTrainedModel, prompt: Tensor) -> None:
    with patched(model, knows(model, prompt)):
        assert "no rounds yet" in str(model.speculation.report())
        for _ in range(2):
            model.generate(prompt, max_new_tokens=13)
        report = model.speculation.report()
        assert report["rows"] == 2 and report["new_tokens"] == 26
        assert report["rounds"] == 2 * model.speculation.last.rounds
        assert report["tokens_per_round"] == report["committed"] / report["rounds"]
        assert "tokens per round" in str(report)
        model.speculation.reset()
        assert model.speculation.report()["rounds"] == 0
