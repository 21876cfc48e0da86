"""Lossy rules for greedy decoding: what each lets pass, worked out by hand and seen in generated text."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import tiny
import torch
from test_accept import Branching

from selfspec.accept import AcceptRule, accept
from selfspec.errors import ConfigError
from selfspec.scoring import History, Processors, TreeScores
from selfspec.target import TargetOutput
from selfspec.tree import DraftTree, TreeShape

torch.set_num_threads(1)
LOGITS = torch.tensor([0.0, 5.0, 4.0, 3.0, 2.0, 1.0])
"""Likeliest first: 1, 2, 3, 4, 5, 0."""


def judged(tokens: list[int], parents: list[int], rule: AcceptRule, do_sample: bool = False) -> tuple[Any, Any]:
    tree = DraftTree(torch.tensor([tokens]), TreeShape(torch.tensor([parents])))
    logits = LOGITS.expand(1, tree.nodes, 6)
    scores = TreeScores(TargetOutput(logits), tree.token_lists, History(torch.zeros(1, 1).long(), 8), Processors([]))
    found = accept(tree, scores, do_sample, Branching([]), rule)
    return found.paths[0], found.tokens[0]


LINE = [-1, 0, 1, 2]


def test_a_guess_among_the_likeliest_k_passes_and_the_target_ends_the_block() -> None:
    rule = AcceptRule("lossy-top-k", top_k=3)
    assert judged([0, 3, 2, 4], LINE, rule) == ([0, 1, 2], [3, 2, 1])
    assert judged([0, 1, 1, 1], LINE, AcceptRule("lossy-top-k", top_k=1)) == ([0, 1, 2, 3], [1, 1, 1, 1])
    assert judged([0, 2, 1, 1], LINE, AcceptRule("lossy-top-k", top_k=1)) == ([0], [1])


def test_a_guess_near_the_likeliest_passes() -> None:
    assert judged([0, 3, 0, 4], LINE, AcceptRule("lossy-distance", distance=2)) == ([0, 1, 2], [3, 0, 1])

    def odd(one: int, other: int) -> float:
        return 0.0 if one % 2 == other % 2 else 9.0

    rule = AcceptRule("lossy-distance", distance=1, metric=odd)
    assert judged([0, 5, 3, 2], LINE, rule) == ([0, 1, 2], [5, 3, 1])


def test_a_round_adds_a_minimum_of_tokens_as_far_as_there_are_guesses() -> None:
    assert judged([0, 5, 5, 5], LINE, AcceptRule("lossy-min-block", min_block=3)) == ([0, 1, 2], [5, 5, 1])
    assert judged([0, 5, 1, 5], LINE, AcceptRule("lossy-min-block", min_block=2)) == ([0, 1, 2], [5, 1, 1])
    assert judged([0, 5], [-1, 0], AcceptRule("lossy-min-block", min_block=9)) == ([0, 1], [5, 1])
    assert judged([0, 5, 5, 5], LINE, AcceptRule("lossy-min-block", min_block=1)) == ([0], [1])


def test_the_exact_child_goes_before_others_that_pass_and_the_likeliest_of_those_wins() -> None:
    rule = AcceptRule("lossy-top-k", top_k=4)
    assert judged([0, 2, 1, 3], [-1, 0, 0, 0], rule) == ([0, 2], [1, 1])
    assert judged([0, 4, 2, 3], [-1, 0, 0, 0], rule) == ([0, 2], [2, 1])


def test_sampling_ignores_rules_for_greedy_decoding() -> None:
    rule = AcceptRule("lossy-min-block", min_block=3)
    assert judged([0, 5, 5, 5], LINE, rule, do_sample=True) == judged([0, 5, 5, 5], LINE, AcceptRule(), True)


@pytest.mark.parametrize("name", ["lossy-top-k", "lossy-distance", "lossy-min-block"])
def test_reports_say_that_the_rule_is_lossy_and_strict_settings_leave_the_text_alone(name: str) -> None:
    model = tiny.model("llama")
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (4, 9)])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=12)
    draft = oracle.Oracle(oracle.unpadded(wanted, mask), oracle.chain(4, 2))
    strict = AcceptRule(name, top_k=1, distance=0, min_block=1)
    with oracle.patched(model, draft, accept=strict):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12), wanted)
        assert "LOSSY" in str(model.speculation.report()) and model.speculation.report()["lossy"]
    loose = AcceptRule(name, top_k=97, distance=97, min_block=5)
    with oracle.patched(model, draft, accept=loose):
        assert not torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12), wanted)
        assert model.speculation.report()["accepted_per_round"] > 2  # 4, 4 and what is left of 12


@pytest.mark.parametrize("options", [{"top_k": 0}, {"min_block": 0}, {"distance": -1.0}], ids=str)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AcceptRule("lossy-top-k", **options)
