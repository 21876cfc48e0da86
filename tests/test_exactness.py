"""Greedy text of a patched model in float32 is, token for token, that of transformers' own `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import oracle
import pytest
import tiny
import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfspec import registry
from selfspec.heads.eagle import EagleConfig
from selfspec.heads.lookup import Lookup, LookupConfig
from selfspec.heads.medusa import MedusaConfig
from selfspec.target import Target

SEEDS = (0, 1, 2)
ATTENTION = ("eager", "sdpa")


@cache
def target_model(family: str, attention: str, seed: int) -> PreTrainedModel:
    return tiny.model(family, attention, seed)


def head(kind: str, model: PreTrainedModel, config: Any, seed: int) -> Any:
    """A head with random weights."""
    generator = torch.Generator().manual_seed(seed)
    made = registry.method(kind).from_target(config, Target(model), generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        ids = torch.randperm(tiny.VOCAB, generator=generator)[: made.output.vocab.size]
        made.output.set_vocab(ids)
    return made


DEEP = [(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (0, 1), (2,), (2, 0), (2, 0, 0)]
DRAFTS: dict[str, Callable[[PreTrainedModel, list[list[int]], int], Any]] = {
    "oracle chain": lambda m, ref, s: oracle.Oracle(ref, oracle.chain(1 + s % 9)),
    "oracle chain, half right": lambda m, ref, s: oracle.Oracle(ref, oracle.chain(7, lambda row, t: (row + t + s) % 8)),
    "oracle, wrong always": lambda m, ref, s: oracle.Oracle(ref, oracle.chain(1 + s % 5, 0)),
    "oracle bush": lambda m, ref, s: oracle.Oracle(ref, oracle.bushy(2 + s % 4, 1 + s % 3)),
    "oracle random trees": lambda m, ref, s: oracle.Oracle(ref, oracle.random_trees(s, 4 + s % 14, 0.7)),
    "oracle wide trees": lambda m, ref, s: oracle.Oracle(ref, oracle.random_trees(s, 30, 0.5, deep=0.1)),
    "oracle deep trees": lambda m, ref, s: oracle.Oracle(ref, oracle.random_trees(s, 24, 0.9, False, 0.9)),
    "medusa": lambda m, ref, s: head("medusa", m, MedusaConfig(num_heads=1 + s % 4, draft_vocab_size=60), s),
    "medusa, own tree": lambda m, ref, s: head("medusa", m, MedusaConfig(num_heads=3, choices=DEEP), s),
    "eagle": lambda m, ref, s: head("eagle", m, EagleConfig(tree_nodes=6 + s % 12, draft_vocab_size=50), s),
    "eagle, deep": lambda m, ref, s: head("eagle", m, EagleConfig(tree_nodes=20, tree_depth=7, tree_top_k=3), s),
    "lookup": lambda m, ref, s: Lookup(LookupConfig(nodes=4 + s % 20, branches=1 + s % 5)),
}
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.1},
    {"bad_words_ids": [[5], [7, 11], [40, 41]]},
    {"suppress_tokens": [3, 8, 15, 60]},
    {"sequence_bias": [[[9], -4.0], [[20, 21], 3.0]]},
    {"exponential_decay_length_penalty": (5, 1.05)},
]


@dataclass(frozen=True)
class Case:
    """One drawn configuration. `ends` names the places of the first row's text whose tokens end a text."""

    family: str
    attention: str
    draft: str
    seed: int
    lengths: tuple[int, ...]
    new_tokens: int
    processors: dict[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    min_new_tokens: int | None = None
    nodes: int | None = None

    def prompts(self) -> tuple[Tensor, Tensor]:
        """Prompts (with some repetition, so that lookup has work) and their mask."""
        chance = random.Random(self.seed)
        rows = []
        for length in self.lengths:
            motif = [chance.randrange(2, tiny.VOCAB) for _ in range(chance.randint(3, 9))]
            rows.append((motif * length)[: length - 1] + [chance.randrange(2, tiny.VOCAB)])
        return oracle.left_padded(rows)

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """What `generate` is given."""
        ids, mask = self.prompts()
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": self.new_tokens}
        given |= self.processors
        if self.ends:
            free = oracle.plain(model, **{k: v for k, v in given.items() if k != "exponential_decay_length_penalty"})
            free = free[0, ids.shape[1] :]
            given["eos_token_id"] = sorted({int(free[min(place, len(free) - 1)]) for place in self.ends})
            given["pad_token_id"] = 0
        if self.min_new_tokens is not None and self.ends:
            given["min_new_tokens"] = self.min_new_tokens
        return given


def check(case: Case) -> float:
    """Compare with plain decoding; returns the tokens per round."""
    model = target_model(case.family, case.attention, case.seed % len(SEEDS))
    given = case.arguments(model)
    wanted = oracle.plain(model, **given)
    references = oracle.unpadded(wanted, given["attention_mask"])
    draft = DRAFTS[case.draft](model, references, case.seed)
    with oracle.patched(model, draft, nodes=case.nodes):
        found = model.generate(**given)
        stats = model.speculation.last
    if not torch.equal(found, wanted):
        raise AssertionError(f"{case}\n{_difference(model, found, wanted, given)}")
    assert stats.new_tokens == sum(_written(row, given) for row in wanted[:, given["input_ids"].shape[1] :].tolist())
    return stats.tokens_per_round


def _written(row: Sequence[int], given: dict[str, Any]) -> int:
    """New tokens of a row, the padding after its end left out."""
    ends = given.get("eos_token_id", [])
    return next((place + 1 for place, token in enumerate(row) if token in ends), len(row))


def _difference(model: PreTrainedModel, found: Tensor, wanted: Tensor, given: dict[str, Any]) -> str:
    """Where the texts part, and how close the two best tokens were there."""
    if found.shape != wanted.shape:
        return f"lengths differ: {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    row, place = (found != wanted).nonzero()[0].tolist()
    text = wanted[row : row + 1, :place][:, int((given["attention_mask"][row] == 0).sum()) :]
    best = model(text).logits[0, -1].topk(2).values
    return (
        f"row {row} differs at token {place}: {int(found[row, place])}, wanted {int(wanted[row, place])}; "
        f"margin of the two best raw logits {float(best[0] - best[1]):.2e}"
    )


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", tiny.NAMES)
def test_every_family_with_a_batch_and_random_trees(family: str, attention: str) -> None:
    speed = check(Case(family, attention, "oracle random trees", 11, (19, 4, 12, 9), 30))
    assert speed > 1.3, "the drafts must be right often, or little is tested"


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_draft_on_one_prompt(family: str, draft: str) -> None:
    check(Case(family, "sdpa", draft, 3, (17,), 36))


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("draft", ["medusa, own tree", "eagle", "lookup"])
def test_the_limit_on_nodes_does_not_change_the_text(draft: str, nodes: int) -> None:
    check(Case("gemma3", "sdpa", draft, 5, (14, 6), 16, nodes=nodes))


TREES: dict[str, Any] = {
    **{f"chain of {n}": oracle.chain(n) for n in (1, 2, 3, 6)},
    "wide": oracle.bushy(1, 8),
    "three at each level": oracle.bushy(5, 3),
    "unbalanced": oracle.random_trees(1, 12, 0.8, ragged=False),
    "64 nodes": oracle.random_trees(2, 63, 0.6, ragged=False, deep=0.6),
    "deeper than the window": oracle.chain(2 * tiny.WINDOW + 1),
    "bush wider and deeper than the window": oracle.bushy(tiny.WINDOW + 3, 2),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_shape_of_the_tree_does_not_change_the_text(family: str) -> None:
    model = target_model(family, "sdpa", 1)
    ids = tiny.text(1, 10, seed=4)
    wanted = oracle.plain(model, ids, max_new_tokens=30)
    for name, make in TREES.items():
        with oracle.patched(model, oracle.Oracle(wanted.tolist(), make)):
            assert torch.equal(model.generate(ids, max_new_tokens=30), wanted), name


def test_rows_that_accept_wildly_different_amounts_keep_to_themselves() -> None:
    model = target_model("gemma3", "sdpa", 2)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (3, 30, 7, 18, 5, 11, 22, 4)])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=40)
    make = oracle.chain(10, lambda row, turn: 10 if row == 0 else 0 if row == 1 else (row * (turn + 1)) % 11)
    with oracle.patched(model, oracle.Oracle(oracle.unpadded(wanted, mask), make)):
        found = model.generate(ids, attention_mask=mask, max_new_tokens=40)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("processors", PROCESSORS[1:5], ids=str)
def test_processors_treat_padded_rows_as_plain_decoding_does(processors: dict[str, Any]) -> None:
    model = target_model("llama", "sdpa", 0)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (3, 9, 6)])
    given = {"attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0, **processors}
    free = oracle.plain(model, ids, **given)
    given["eos_token_id"] = int(free[1, ids.shape[1] + 5])
    wanted = oracle.plain(model, ids, **given)
    with oracle.patched(model, oracle.Oracle(oracle.unpadded(wanted, mask), oracle.bushy(3, 2))):
        assert torch.equal(model.generate(ids, **given), wanted)


def test_one_row_may_be_drafted_for_while_another_is_not() -> None:
    model = target_model("llama", "eager", 1)
    ids = tiny.text(3, 9)
    wanted = oracle.plain(model, ids, max_new_tokens=30)

    def make(root: int, truth: list[int], row: int, turn: int) -> oracle.Guess:
        return oracle.chain((0, 2, 5)[row])(root, truth, row, turn)

    with oracle.patched(model, oracle.Oracle(wanted.tolist(), make)):
        assert torch.equal(model.generate(ids, max_new_tokens=30), wanted)


def test_a_draft_that_is_never_right_costs_one_token_per_round() -> None:
    model = target_model("llama", "sdpa", 0)
    ids = tiny.text(1, 12)
    wanted = oracle.plain(model, ids, max_new_tokens=20)
    for make in (oracle.chain(1, 0), oracle.chain(2, 0), oracle.chain(8, 0)):
        with oracle.patched(model, oracle.Oracle(wanted.tolist(), make)):
            assert torch.equal(model.generate(ids, max_new_tokens=20), wanted)
            assert model.speculation.last.accepted == 0
            assert model.speculation.last.rounds == 19


def drawn_case(seed: int, new_tokens: int) -> Case:
    """A configuration drawn from everything above."""
    chance = random.Random(1_000 + seed)
    batch = chance.choice([1, 1, 4])
    case = Case(
        family=tiny.NAMES[seed % len(tiny.NAMES)],
        attention=chance.choice(ATTENTION),
        draft=chance.choice(list(DRAFTS)),
        seed=seed,
        lengths=tuple(chance.randint(1, 40) for _ in range(batch)),
        new_tokens=new_tokens,
        processors=chance.choice(PROCESSORS),
        nodes=chance.choice([None, None, None, 3, 9]),
    )
    if chance.random() < 0.3 or "exponential_decay_length_penalty" in case.processors:
        places = tuple(chance.randint(new_tokens // 4, new_tokens) for _ in range(chance.randint(1, 2)))
        case = replace(case, ends=places, min_new_tokens=chance.choice([None, None, new_tokens // 2]))
    return case


@pytest.mark.parametrize("seed", range(12))
def test_drawn_configurations(seed: int) -> None:
    check(drawn_case(seed, 60))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 420))
def test_drawn_configurations_of_two_hundred_tokens(seed: int) -> None:
    check(drawn_case(seed, 200))
