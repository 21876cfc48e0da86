"""Configurations drawn over family, draft, tree, batch, padding, processors, stops and lengths: greedy text in float32
is that of transformers' own `generate`. Methods join by their row in the contract test. A failure is shrunk first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import oracle
import pytest
import tiny
import torch
from test_draft_contract import ROWS, make
from test_exactness import PROCESSORS
from torch import Tensor
from transformers import PreTrainedModel

from selfspec import registry
from selfspec import target as door
from selfspec.changes import changes_target
from selfspec.target import Target

DEFAULT, NIGHTLY, BLOCK = 150, 2000, 10
SCRIPTED = ("llama", "qwen3", "gemma3", "mistral", "gpt_neox")
BUILT = ("llama", "gemma3")
"""Families of the contract test, in which every method can be built."""

SCRIPTS: dict[str, Callable[[int], Any]] = {
    "chain": lambda s: oracle.chain(1 + s % 9, lambda row, turn: (row + turn + s) % 10),
    "bush": lambda s: oracle.bushy(1 + s % 4, 1 + s % 3),
    "random trees": lambda s: oracle.random_trees(s, 3 + s % 14, 0.7),
    "wide trees": lambda s: oracle.random_trees(s, 24, 0.5, deep=0.1),
    "deep trees": lambda s: oracle.random_trees(s, 20, 0.9, False, 0.9),
}
METHODS = {row.name: row for row in ROWS if not changes_target(registry.method(row.kind))}
"""Those whose text is the target's own."""
MORE_PROCESSORS: list[dict[str, Any]] = [
    *PROCESSORS[:-1],
    {"repetition_penalty": 0.7},
    {"bad_words_ids": [[9, 10, 11]], "no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": [4, 20]},
]


class StopsAt:
    """A criterion of the caller's own: the newest token and the one before it add up to a multiple of something."""

    row_independent = True

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(-1) % self.divisor == 0

    def __repr__(self) -> str:
        return f"StopsAt({self.divisor})"


@dataclass(frozen=True)
class Configuration:
    """One drawn configuration. `ends` names places of the first row's text whose tokens end a text."""

    family: str
    attention: str
    draft: str
    seed: int
    lengths: tuple[int, ...]
    new_tokens: int
    processors: dict[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0
    divisor: int = 0
    nodes: int | None = None
    mask: bool = True
    pad_is_end: bool = False


@pytest.fixture(autouse=True, scope="module")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What drafts keep between runs goes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@cache
def opened(family: str, attention: str) -> Target:
    return tiny.selfspec_target(family, attention)


@cache
def built(kind: str, family: str, attention: str) -> Any:
    return make(METHODS[kind], opened(family, attention))


def drawn(seed: int) -> Configuration:
    """The configuration of a seed."""
    chance = random.Random(7_000 + seed)
    draft = chance.choice([*SCRIPTS, *METHODS])
    batch = chance.choice([1, 1, 1, 2, 4])
    case = Configuration(
        chance.choice(SCRIPTED if draft in SCRIPTS else BUILT),
        chance.choice(["eager", "sdpa"]),
        draft,
        seed,
        tuple(chance.randint(1, 26) for _ in range(batch)),
        chance.randint(1, 16),
        chance.choice(MORE_PROCESSORS),
        nodes=chance.choice([None, None, None, 1, 3, 9]),
        mask=batch > 1 or chance.random() < 0.7,
    )
    if chance.random() < 0.4:
        places = tuple(chance.randrange(case.new_tokens) for _ in range(chance.randint(1, 3)))
        least = chance.choice([0, 0, case.new_tokens // 2])
        case = replace(case, ends=places, min_new_tokens=least, pad_is_end=chance.random() < 0.5)
    if chance.random() < 0.25 and (batch == 1 or case.ends):
        case = replace(case, divisor=chance.choice([3, 5, 11]))
    return case


def arguments(case: Configuration, model: PreTrainedModel) -> dict[str, Any]:
    """What `generate` is given. Prompts repeat themselves, so that n-grams are found."""
    chance = random.Random(case.seed)
    rows = []
    for length in case.lengths:
        motif = [chance.randrange(2, tiny.VOCAB) for _ in range(chance.randint(2, 6))]
        rows.append((motif * length)[:length])
    ids, mask = oracle.left_padded(rows)
    given: dict[str, Any] = {"input_ids": ids, "max_new_tokens": case.new_tokens, "pad_token_id": 0, **case.processors}
    if case.mask:
        given["attention_mask"] = mask
    if case.ends:
        free = oracle.plain(model, **given)[0, ids.shape[1] :].tolist()
        given["eos_token_id"] = sorted({free[min(place, len(free) - 1)] for place in case.ends})
        if case.min_new_tokens:
            given["min_new_tokens"] = case.min_new_tokens
        if case.pad_is_end:
            given["pad_token_id"] = given["eos_token_id"][0]
    if case.divisor:
        given["stopping_criteria"] = [StopsAt(case.divisor)]
    return given


def mismatch(case: Configuration) -> str | None:
    """What differs from plain decoding, None when nothing does."""
    target = opened(case.family, case.attention)
    given = arguments(case, target.model)
    wanted = oracle.plain(target.model, **given)
    if case.draft in SCRIPTS:
        references = oracle.unpadded(wanted, given.get("attention_mask"))
        draft = oracle.Oracle(references, SCRIPTS[case.draft](case.seed))
    else:
        draft = built(case.draft, case.family, case.attention)
    with oracle.patched(target.model, draft, nodes=case.nodes):
        found = target.model.generate(**given)
        assert target.model.speculation.last is not None, f"{case} was not decoded speculatively"
    if torch.equal(found, wanted):
        return None
    return f"found  {found.tolist()}\nwanted {wanted.tolist()}"


def simpler(case: Configuration) -> Iterator[Configuration]:
    """Configurations with one thing less, the largest cuts first."""
    for row in range(len(case.lengths)) if len(case.lengths) > 1 else ():
        yield replace(case, lengths=case.lengths[row : row + 1])
    yield replace(case, processors={})
    yield replace(case, ends=(), min_new_tokens=0, pad_is_end=False, divisor=case.divisor * (len(case.lengths) == 1))
    yield replace(case, divisor=0)
    yield replace(case, nodes=None)
    for new_tokens in (case.new_tokens // 2, case.new_tokens - 1):
        if new_tokens:
            yield replace(case, new_tokens=new_tokens)
    for shorter in (tuple(max(1, n // 2) for n in case.lengths), tuple(max(1, n - 1) for n in case.lengths)):
        yield replace(case, lengths=shorter)


def smallest(case: Configuration) -> Configuration:
    """A failing configuration from which nothing can be taken without the failure going away."""
    for candidate in simpler(case):
        if candidate != case and mismatch(candidate) is not None:
            return smallest(candidate)
    return case


def check(seeds: range) -> None:
    for seed in seeds:
        case = drawn(seed)
        if mismatch(case) is not None:
            least = smallest(case)
            raise AssertionError(f"seed {seed}: {case}\nsmallest that fails: {least}\n{mismatch(least)}")


@pytest.mark.parametrize("first", range(0, DEFAULT, BLOCK))
def test_drawn_configurations_give_the_text_of_plain_decoding(first: int) -> None:
    check(range(first, first + BLOCK))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(DEFAULT, DEFAULT + NIGHTLY, BLOCK))
def test_two_thousand_more_drawn_configurations(first: int) -> None:
    check(range(first, first + BLOCK))


def test_the_draw_reaches_every_draft_and_every_option() -> None:
    cases = [drawn(seed) for seed in range(DEFAULT)]
    assert {case.draft for case in cases} == {*SCRIPTS, *METHODS}
    assert {case.family for case in cases} == set(SCRIPTED)
    assert {len(case.lengths) for case in cases} == {1, 2, 4}
    for reached in ("ends", "divisor", "min_new_tokens", "pad_is_end", "nodes", "processors"):
        assert any(getattr(case, reached) for case in cases), reached


def test_a_failure_names_its_seed_and_the_smallest_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    # A model of its own: one that drafts with adapters were built on is compared with fresh passes when it is patched,
    # which would find the fault first.
    monkeypatch.setitem(globals(), "opened", cache(lambda family, attention: tiny.selfspec_target(family, attention)))
    right = door.tree_positions
    monkeypatch.setattr(door, "tree_positions", lambda shape, slots: right(shape, slots) + (shape.nodes > 1))
    case = Configuration("llama", "sdpa", "chain", 1, (5, 3), 9, {"repetition_penalty": 1.1}, ends=(8,))
    monkeypatch.setitem(globals(), "drawn", lambda seed: case)
    with pytest.raises(AssertionError, match=r"seed 41: .*\nsmallest that fails: .*\nfound .*\nwanted ") as failure:
        check(range(41, 42))
    least = smallest(case)
    assert str(least) in str(failure.value)
    assert (len(least.lengths), least.processors, least.ends) == (1, {}, ())
