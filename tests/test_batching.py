"""Rows that join and leave a running batch write what transformers' own `generate` writes for each of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from oracle import plain
from scipy.stats import kstest

from selfspec import registry
from selfspec.errors import UnsupportedGeneration
from selfspec.heads.lookup import Lookup
from selfspec.inference import request as requests
from selfspec.inference.batching import Batch, longest_text
from selfspec.inference.certify.models import wide_model
from selfspec.inference.rows import News, Row
from selfspec.inference.runs import prepare
from selfspec.inference.undrafted import Undrafted
from selfspec.output_head import FewRowsHead
from selfspec.resolve import resolve_draft
from selfspec.screen import Screen
from selfspec.stats import Stats
from selfspec.target import Target

GREEDY: dict[str, Any] = {"max_new_tokens": 14}
WISHES: list[dict[str, Any]] = [
    GREEDY,
    {"max_new_tokens": 9, "repetition_penalty": 1.4},
    {"max_new_tokens": 17, "do_sample": True, "temperature": 0.8, "top_k": 0},
    {"max_new_tokens": 6, "do_sample": True, "temperature": 1.3, "top_p": 0.8, "top_k": 20},
    {"max_new_tokens": 20, "no_repeat_ngram_size": 2},
]


class Ears:
    """Remembers all news; ends the row after `most` tokens."""

    def __init__(self, most: int | None = None) -> None:
        self.news: list[News] = []
        self.most = most

    @property
    def tokens(self) -> list[int]:
        return [token for news in self.news for token in news.tokens]

    def take(self, news: News) -> bool:
        self.news.append(news)
        return self.most is not None and len(self.tokens) >= self.most


def prompt(number: int) -> list[int]:
    """Prompts of different lengths, long enough for the windows of tiny models, with repetitions to look up."""
    part = tiny.text(1, 4 + 3 * number, seed=number)[0].tolist()
    return part + part[: 3 + number]


def row(target: Target, number: int, wish: dict[str, Any], ears: Ears, top: int | None = None) -> Row:
    request = prepare(target, prompt(number), {"eos_token_id": None, **wish})
    request.generator = torch.Generator().manual_seed(number)
    return Row(request, ears, top)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def alone(target: Target, number: int, wish: dict[str, Any]) -> list[int]:
    """What transformers writes for one prompt, with torch's own generator at the row's seed."""
    ids = torch.tensor([prompt(number)])
    with seeded(number):
        out = plain(target.model, ids, attention_mask=torch.ones_like(ids), **{"eos_token_id": None, **wish})
    return out[0, ids.shape[1] :].tolist()


def trained(kind: str, target: Target) -> Any:
    method = registry.method(kind)
    return method.from_target(method.config_class(), target, torch.Generator().manual_seed(0))


DRAFTS = ["none", "lookup", "medusa", "eagle"]


def draft(kind: str, target: Target) -> Any:
    if kind == "none":
        return Undrafted()
    return Lookup() if kind == "lookup" else trained(kind, target)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_join_and_leave_write_what_each_writes_alone(family: str, kind: str) -> None:
    target = tiny.selfspec_target(family)
    guess, stats = draft(kind, target), Stats()
    ears = [Ears() for _ in WISHES]
    rows = [row(target, number, wish, ears[number]) for number, wish in enumerate(WISHES)]
    batch, sizes = Batch(target, guess, rows[:2], stats), set()
    for late in (rows[2:4], rows[4:]):
        batch.round()
        sizes.add(len(batch.rows))
        fresh = Batch(target, guess, late, stats)
        assert batch.joins(fresh)
        batch.join(fresh)
    while batch.rows:
        sizes.add(len(batch.rows))
        batch.round()
    assert len(sizes) >= 3, "rows join and leave at different times"
    for number, wish in enumerate(WISHES):
        assert ears[number].tokens == alone(target, number, wish), number
        assert ears[number].news[-1].ended == "length"
    assert stats.rows == len(WISHES) and stats.new_tokens == sum(len(e.tokens) for e in ears)


def test_a_seeded_row_is_the_same_with_any_draft_and_any_company(model: Any) -> None:
    target = Target(model)
    wish = {"max_new_tokens": 30, "do_sample": True, "temperature": 1.0, "top_k": 0}
    texts = []
    for kind, company in (("none", 0), ("lookup", 0), ("lookup", 3)):
        ears = Ears()
        others = [row(target, number, {**wish, "max_new_tokens": 11}, Ears()) for number in range(1, 1 + company)]
        batch = Batch(target, draft(kind, target), [*others, row(target, 4, wish, ears)], Stats())
        while batch.rows:
            batch.round()
        texts.append(ears.tokens)
    assert texts[0] == texts[1] == texts[2] == alone(target, 4, wish)


def test_a_row_that_is_dropped_or_stopped_by_its_listener_changes_nothing_for_the_others(model: Any) -> None:
    target = Target(model)
    ears = [Ears(), Ears(most=3), Ears()]
    rows = [row(target, number, GREEDY, ears[number]) for number in range(3)]
    batch = Batch(target, Lookup(), rows, Stats())
    batch.round()
    batch.drop([rows[0]])
    heard = len(ears[0].tokens)
    while batch.rows:
        batch.round()
    assert ears[2].tokens == alone(target, 2, GREEDY)
    assert len(ears[0].tokens) == heard and 3 <= len(ears[1].tokens) < 14


def test_an_end_token_ends_a_row_and_is_told(model: Any) -> None:
    target = Target(model)
    end = alone(target, 1, GREEDY)[5]
    wish = {"max_new_tokens": 14, "eos_token_id": end}
    ears = Ears()
    batch = Batch(target, Lookup(), [row(target, 1, wish, ears), row(target, 2, GREEDY, Ears())], Stats())
    while batch.rows:
        batch.round()
    assert ears.tokens == alone(target, 1, wish) and ears.tokens[-1] == end
    assert ears.news[-1].ended == "stop"


def test_origins_say_what_the_draft_guessed(model: Any) -> None:
    target = Target(model)
    wish = {"max_new_tokens": 40, "repetition_penalty": 0.5}  # repeats itself, so that lookup is right
    ears = Ears()
    stats = Stats()
    batch = Batch(target, Lookup(), [row(target, 2, wish, ears)], stats)
    while batch.rows:
        batch.round()
    drafted = sum(origin > 0 for news in ears.news for origin in news.origins)
    assert drafted == stats.accepted > 5
    for news in ears.news:
        depths = [origin for origin in news.origins if origin]
        assert depths == list(range(1, len(depths) + 1)) and len(news.origins) == len(news.tokens)


def test_log_probabilities_are_those_of_a_fresh_pass(model: Any) -> None:
    target = Target(model)
    ears = Ears()
    wish = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.5, "top_k": 5}
    batch = Batch(target, Lookup(), [row(target, 3, wish, ears, top=3), row(target, 1, GREEDY, Ears())], Stats())
    while batch.rows:
        batch.round()
    text = torch.tensor([prompt(3) + ears.tokens])
    scores = model(text).logits[0, len(prompt(3)) - 1 : -1].float().log_softmax(-1)
    likely = [one for news in ears.news for one in news.likely]
    assert len(likely) == len(ears.tokens)
    for place, (token, one) in enumerate(zip(ears.tokens, likely, strict=True)):
        assert one.chosen == pytest.approx(float(scores[place, token]), abs=1e-4)
        best = scores[place].topk(3)
        assert [t for t, _ in one.top] == best.indices.tolist()
        assert [v for _, v in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_batches_of_drafts_that_cannot_join_stay_apart(model: Any) -> None:
    target = Target(model)
    guess = resolve_draft("early-exit", target)
    ears = [Ears(), Ears()]
    batches = [Batch(target, guess, [row(target, n, GREEDY, ears[n])], Stats()) for n in (0, 1)]
    assert not batches[0].joins(batches[1])
    with pytest.raises(UnsupportedGeneration):
        batches[0].join(batches[1])
    while any(batch.rows for batch in batches):
        for batch in batches:
            if batch.rows:
                batch.round()
    assert [e.tokens for e in ears] == [alone(target, n, GREEDY) for n in (0, 1)]
    target.release()


def test_a_joined_cache_is_as_large_as_its_rows_need_and_no_larger(model: Any) -> None:
    target = Target(model)
    long = row(target, 0, {"max_new_tokens": 300}, Ears())
    batch = Batch(target, Lookup(), [long, row(target, 1, GREEDY, Ears())], Stats())
    batch.drop([long])
    batch.join(Batch(target, Lookup(), [row(target, 2, GREEDY, Ears())], Stats()))
    assert batch.cache.slots.capacity == batch.cache.layers[0].stored_keys.shape[2] < 150


def test_the_longest_text_is_where_scores_begin_to_depend_on_other_rows() -> None:
    target = tiny.selfspec_target("llama")
    assert longest_text(target) == 512
    target.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target.config.max_position_embeddings = 64
    assert longest_text(target) == 64


# Draws without all logits

needs_kernels = pytest.mark.skipif(
    not Screen.applies(torch.empty(1, 1).expand(40_000, 1)), reason="no kernels for bytes on this processor"
)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A target whose output head is screened; short texts draw from that, too."""
    monkeypatch.setattr(requests, "_LONG", 2)
    target = Target(wide_model())
    target.screen(prompt(4))
    yield target
    target.release()


def written(target: Target, kind: str, others: list[Row], one: Row) -> list[int]:
    batch = Batch(target, draft(kind, target), [*others, one], Stats())
    while batch.rows:
        batch.round()
    assert isinstance(one.listener, Ears)
    return one.listener.tokens


@needs_kernels
@pytest.mark.parametrize("options", [{"top_k": 0, "temperature": 0.9}, {"top_k": 30, "top_p": 0.9}])
def test_a_row_drawn_without_all_logits_is_the_same_in_any_company(
    options: dict[str, Any], wide: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows that need all logits, and beside so many that `generate` would not screen them."""
    wish = {"max_new_tokens": 8, "do_sample": True, **options}
    made: list[int] = []
    call = FewRowsHead.__call__
    monkeypatch.setattr(FewRowsHead, "__call__", lambda self, hidden: made.append(1) or call(self, hidden))
    texts = [written(wide, kind, [], row(wide, 4, wish, Ears())) for kind in ("none", "lookup")]
    assert not made
    greedy, penalty = row(wide, 1, GREEDY, Ears()), row(wide, 2, {**wish, "repetition_penalty": 1.2}, Ears())
    texts.append(written(wide, "lookup", [greedy, penalty, row(wide, 3, wish, Ears(), 2)], row(wide, 4, wish, Ears())))
    assert made
    many = [row(wide, 1 + number % 3, {**wish, "max_new_tokens": 3}, Ears()) for number in range(65)]
    texts.append(written(wide, "none", many, row(wide, 4, wish, Ears())))
    assert all(text == texts[0] for text in texts)
    assert len(set(texts[0])) > 3 and texts[0] != written(wide, "none", [], row(wide, 5, wish, Ears()))


@needs_kernels
def test_a_row_under_a_top_k_takes_the_tokens_that_its_numbers_stand_for(wide: Target) -> None:
    """One uniform number per token, and the running sum of the probabilities from transformers' own pass."""
    found = written(wide, "lookup", [], row(wide, 4, {"max_new_tokens": 12, "do_sample": True, "top_k": 30}, Ears()))
    numbers = torch.rand(len(found), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ids = torch.tensor([prompt(4) + found])
    logits = wide.model(input_ids=ids, use_cache=False).logits[0, len(prompt(4)) - 1 : -1].double()
    best = logits.topk(30).indices
    p = torch.zeros_like(logits).scatter_(1, best, logits.gather(1, best).softmax(-1))
    wanted = [int(torch.searchsorted(sums, number)) for sums, number in zip(p.cumsum(1), numbers, strict=True)]
    assert found == wanted


@needs_kernels
def test_rows_drawn_without_all_logits_have_the_distribution_of_the_softmax(wide: Target) -> None:
    """Where tokens lie in it is uniform (Kolmogorov-Smirnov). A right one fails once in a million; seeds are fixed."""
    wish = {"max_new_tokens": 2, "do_sample": True, "top_k": 0, "temperature": 0.8}
    rows = [row(wide, 4, wish, Ears()) for _ in range(120)]
    for seed, one in enumerate(rows):
        one.request.generator = torch.Generator().manual_seed(seed)
    batch = Batch(wide, Undrafted(), rows, Stats())
    batch.round()
    texts = torch.tensor([one.listener.tokens for one in rows])  # type: ignore[attr-defined]
    ids = torch.cat([torch.tensor(prompt(4)).expand(120, -1), texts[:, :1]], 1)
    logits = wide.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1].double()
    own = torch.rand(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def places(temperature: float) -> list[float]:
        p = (logits / temperature).softmax(-1)
        share = p.gather(1, texts[:, 1:])
        return ((p * (p > share)).sum(1) + own * share[:, 0]).tolist()

    assert kstest(places(0.8), "uniform").pvalue > 1e-6
    assert kstest(places(1.2), "uniform").pvalue < 1e-6, "the test has teeth"
