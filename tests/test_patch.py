"""`generate` of a patched model keeps its meaning. The judge is transformers' own `generate` on the same model."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import oracle
import pytest
import tiny
import torch
from oracle import Oracle, patched, plain
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import selfspec
from selfspec.draft import Verified
from selfspec.errors import CheckpointError, ConfigError, UnsupportedGeneration, UnsupportedModel

NEW = 24


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return tiny.text(1, 12)


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    """The new tokens of plain decoding."""
    return plain(model, prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist()


@pytest.fixture(autouse=True)
def always_unpatched(model: PreTrainedModel) -> Iterator[None]:
    yield
    selfspec.unpatch(model)


def knows(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, make: Any = None, new: int = NEW) -> Oracle:
    """A draft that knows the free continuation of these prompts."""
    text = plain(model, ids, attention_mask=mask, max_new_tokens=new, eos_token_id=None)
    return Oracle(oracle.unpadded(text, mask), make or oracle.chain(5))


def unused(tokens: list[int]) -> int:
    """A token that does not occur."""
    return next(t for t in range(tiny.VOCAB - 1, 0, -1) if t not in tokens)


class Counter:
    """Forward passes of the target that use a cache, and their widths."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.widths: list[int] = []
        self.handle = model.model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is not None:
            self.widths.append(kwargs["input_ids"].shape[1])


MAKERS = {
    "blocks of 3": oracle.chain(3),
    "blocks of 5": oracle.chain(5),
    "blocks of 16": oracle.chain(16),
    "tree": oracle.bushy(6, 2),
}


# End tokens


@pytest.mark.parametrize("name", MAKERS)
def test_text_ends_at_the_first_end_token_wherever_it_falls_in_a_run(
    name: str, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    with patched(model, knows(model, prompt, make=MAKERS[name])):
        for place in range(1, NEW):
            end = reference[place]
            others = ([end, unused(reference)], torch.tensor([end])) if place % 6 == 0 else ()
            for ends in (end, *others):
                found = model.generate(prompt, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0)
                assert found[0, prompt.shape[1] :].tolist() == reference[: reference.index(end) + 1], (place, ends)


def test_a_row_that_ends_is_padded_and_leaves_its_neighbours_alone(model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (4, 12, 7)])
    free = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    with patched(model, knows(model, ids, mask, oracle.bushy(4, 2))):
        for row, place in ((0, 2), (1, 9), (2, 17)):
            given = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": int(free[row, place])}
            for pad in (0, int(free[row, place])):
                wanted = plain(model, ids, pad_token_id=pad, **given)
                assert torch.equal(model.generate(ids, pad_token_id=pad, **given), wanted)


@pytest.mark.parametrize(
    "form",
    [lambda t: None, lambda t: t, lambda t: [t, t], lambda t: torch.tensor([t])],
    ids=["none", "int", "list", "tensor"],
)
@pytest.mark.parametrize("pad", [None, 0])
def test_all_forms_of_end_tokens_run_to_the_limit_when_none_occurs(
    form: Callable[[int], Any], pad: int | None, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    with patched(model, knows(model, prompt)):
        found = model.generate(prompt, max_new_tokens=NEW, eos_token_id=form(unused(reference)), pad_token_id=pad)
    assert found[0, prompt.shape[1] :].tolist() == reference


# Lengths


@pytest.mark.parametrize("new", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("make", [oracle.chain(8), oracle.bushy(8, 2)], ids=["chain", "tree"])
def test_exactly_as_many_tokens_as_asked_for(
    new: int, make: Any, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    with patched(model, knows(model, prompt, make=make)):
        counter = Counter(model)
        found = model.generate(prompt, max_new_tokens=new)
        counter.handle.remove()
        assert found[0, prompt.shape[1] :].tolist() == reference[:new]
        by_length = model.generate(prompt, max_length=prompt.shape[1] + new)
        assert torch.equal(by_length, found)
    rounds = 0 if new == 1 else 1
    assert len(counter.widths) == 1 + rounds, "the prefill, and one round where a token is left"
    if rounds:
        deepest = new - 2
        assert counter.widths[1] == 1 + deepest * (1 if make is not None and len(make(0, [1] * 9, 0, 0)[0]) == 9 else 2)


def test_no_position_beyond_what_the_model_is_made_for(prompt: Tensor) -> None:
    wanted = plain(tiny.model("llama"), prompt, max_new_tokens=6)
    small = tiny.model("llama")
    small.config.max_position_embeddings = prompt.shape[1] + 6
    seen: list[int] = []
    small.model.register_forward_pre_hook(
        lambda m, a, kw: seen.append(int(kw["position_ids"].max())) if kw.get("cache") is not None else None,
        with_kwargs=True,
    )
    with patched(small, Oracle(wanted.tolist(), oracle.chain(8))):
        assert torch.equal(small.generate(prompt, max_new_tokens=6), wanted)
    assert max(seen) < prompt.shape[1] + 6


@pytest.mark.parametrize("least", [1, 4, 10, 23])
def test_the_least_number_of_new_tokens_counts_tokens_not_rounds(
    least: int, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    with patched(model, knows(model, prompt, make=oracle.bushy(6, 3))):
        for place in (1, 3, 9):
            given = {"max_new_tokens": NEW, "min_new_tokens": least, "eos_token_id": reference[place]}
            wanted = plain(model, prompt, pad_token_id=0, **given)
            assert torch.equal(model.generate(prompt, pad_token_id=0, **given), wanted)


# Stop strings and criteria


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    # transformers finds out how tokens join by putting "abcdef" in front of them.
    words = {word(i): i for i in range(tiny.VOCAB)} | {"abcdef": tiny.VOCAB}
    made = Tokenizer(WordLevel(words, unk_token=word(0)))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=word(0), unk_token=word(0))


def word(token: int) -> str:
    return f"w{token:02d}"


@pytest.mark.parametrize("length", range(1, 17))
def test_stop_strings_end_the_text_in_any_run_and_across_runs(
    length: int, model: PreTrainedModel, prompt: Tensor, reference: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    one, two = word(reference[2]), f"{word(reference[7])} {word(reference[8])}"
    with patched(model, knows(model, prompt, make=oracle.chain(length))):
        for stop in ([one], [two], ["nothing like it", two]):
            given = {"max_new_tokens": NEW, "stop_strings": stop, "tokenizer": tokenizer}
            wanted = plain(model, prompt, **given)
            assert wanted.shape[1] < prompt.shape[1] + NEW
            assert torch.equal(model.generate(prompt, **given), wanted)


def test_a_stop_string_in_the_prompt_stops_nothing(
    model: PreTrainedModel, prompt: Tensor, reference: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    stop = next(word(t) for t in prompt[0].tolist() if t not in reference)
    with patched(model, knows(model, prompt)):
        found = model.generate(prompt, max_new_tokens=NEW, stop_strings=stop, tokenizer=tokenizer)
    assert found[0, prompt.shape[1] :].tolist() == reference


def test_stop_strings_may_come_from_a_generation_config(
    model: PreTrainedModel, prompt: Tensor, reference: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = GenerationConfig(max_new_tokens=NEW, stop_strings=[word(reference[4])], pad_token_id=0)
    wanted = plain(model, prompt, config, tokenizer=tokenizer)
    with patched(model, knows(model, prompt)):
        assert torch.equal(model.generate(prompt, config, tokenizer=tokenizer), wanted)
        assert config.stop_strings == [word(reference[4])], "the caller's object is not changed"
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(prompt, config)


def test_stop_strings_may_be_the_models_own_default(
    prompt: Tensor, reference: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    own = tiny.model("llama")
    own.generation_config.stop_strings = [word(reference[4])]
    wanted = plain(own, prompt, max_new_tokens=NEW, tokenizer=tokenizer)
    assert wanted.shape[1] < prompt.shape[1] + NEW
    with patched(own, Oracle(plain(tiny.model("llama"), prompt, max_new_tokens=NEW).tolist(), oracle.chain(6))):
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW, tokenizer=tokenizer), wanted)
        config = GenerationConfig(max_new_tokens=NEW)
        assert torch.equal(own.generate(prompt, config, tokenizer=tokenizer), wanted)
        override = {"stop_strings": [word(reference[9])], "max_new_tokens": NEW, "tokenizer": tokenizer}
        assert torch.equal(own.generate(prompt, **override), plain(own, prompt, **override))


class StopAfter(StoppingCriteria):
    """Stops after a token; `as_bool` answers with a Python bool, as older code does."""

    def __init__(self, token: int, as_bool: bool) -> None:
        self.token = token
        self.as_bool = as_bool
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids[0].tolist())
        found = input_ids[:, -1] == self.token
        return bool(found.all()) if self.as_bool else found


@pytest.mark.parametrize("as_bool", [False, True])
def test_a_users_criterion_is_asked_after_every_token(
    as_bool: bool, model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    wanted, found = StopAfter(reference[6], as_bool), StopAfter(reference[6], as_bool)
    text = plain(model, prompt, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([wanted]))
    with patched(model, knows(model, prompt)):
        same = model.generate(prompt, max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([found]))
    assert torch.equal(same, text)
    assert found.seen == wanted.seen


def test_criteria_of_one_row_end_that_row_only_where_an_end_token_exists(model: PreTrainedModel) -> None:
    ids = tiny.text(3, 8)
    free = plain(model, ids, max_new_tokens=NEW)[:, 8:]
    given = {"max_new_tokens": NEW, "eos_token_id": 96, "pad_token_id": 0}
    stop = StoppingCriteriaList([StopAfter(int(free[1, 5]), False)])
    wanted = plain(model, ids, stopping_criteria=stop, **given)
    with patched(model, knows(model, ids)):
        assert torch.equal(model.generate(ids, stopping_criteria=stop, **given), wanted)


def test_criteria_on_several_rows_without_an_end_token_fall_back(model: PreTrainedModel) -> None:
    ids = tiny.text(2, 8)
    free = plain(model, ids, max_new_tokens=NEW)[:, 8:]
    stop = StoppingCriteriaList([StopAfter(int(free[1, 5]), False)])
    wanted = plain(model, ids, stopping_criteria=stop, max_new_tokens=NEW)
    with patched(model, knows(model, ids)), pytest.warns(UserWarning, match="without speculation"):
        assert torch.equal(model.generate(ids, stopping_criteria=stop, max_new_tokens=NEW), wanted)


def test_a_length_limit_given_as_a_criterion(model: PreTrainedModel, prompt: Tensor, reference: list[int]) -> None:
    stop = StoppingCriteriaList([MaxLengthCriteria(prompt.shape[1] + 4)])
    with patched(model, knows(model, prompt)):
        found = model.generate(prompt, stopping_criteria=stop, max_new_tokens=NEW)
    assert found[0, prompt.shape[1] :].tolist() == reference[:4]


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


# Streams


class Recorder(BaseStreamer):
    def __init__(self, fail_at: int | None = None) -> None:
        self.parts: list[list[int]] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())
        if self.fail_at is not None and len(self.parts) > self.fail_at:
            raise RuntimeError("listener gone")

    def end(self) -> None:
        self.ends += 1


def test_a_stream_gets_what_plain_decoding_would_put(
    model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    theirs, mine = Recorder(), Recorder()
    given = {"max_new_tokens": NEW, "eos_token_id": reference[9], "pad_token_id": 0}
    plain(model, prompt, streamer=theirs, **given)
    with patched(model, knows(model, prompt)):
        model.generate(prompt, streamer=mine, **given)
    assert mine.parts == theirs.parts
    assert mine.ends == theirs.ends == 1


def test_a_stream_of_several_rows(model: PreTrainedModel) -> None:
    ids = tiny.text(3, 6)
    free = plain(model, ids, max_new_tokens=NEW)[:, 6:]
    given = {"max_new_tokens": NEW, "eos_token_id": int(free[0, 4]), "pad_token_id": 0}
    theirs, mine = Recorder(), Recorder()
    plain(model, ids, streamer=theirs, **given)
    with patched(model, knows(model, ids, make=oracle.chain(5, lambda row, turn: (row * turn) % 6))):
        model.generate(ids, streamer=mine, **given)
    assert mine.parts == theirs.parts
    assert mine.ends == 1


def test_a_text_stream_joins_to_the_decoded_text(
    model: PreTrainedModel, prompt: Tensor, reference: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with patched(model, knows(model, prompt)):
        model.generate(prompt, max_new_tokens=NEW, streamer=stream)
    assert "".join(stream) == tokenizer.decode(reference)


class Breaks(oracle.Scripted):
    """A draft that fails in a given round."""

    def __init__(self, error: BaseException, at: int, inner: Oracle) -> None:
        self.error = error
        self.at = at
        self.inner = inner

    def tree(self, state: Any, budget: Any, generator: Any) -> Any:
        if state.round == self.at:
            raise self.error
        return self.inner.tree(state, budget, generator)


def test_a_stream_is_closed_once_when_the_draft_fails(model: PreTrainedModel, prompt: Tensor) -> None:
    stream = Recorder()
    draft = Breaks(RuntimeError("broken"), 1, knows(model, prompt))
    with patched(model, draft), pytest.raises(RuntimeError, match="broken"):
        model.generate(prompt, max_new_tokens=NEW, streamer=stream)
    assert stream.ends == 1


def test_a_stream_that_fails_is_closed_once(model: PreTrainedModel, prompt: Tensor) -> None:
    stream = Recorder(fail_at=4)
    with patched(model, knows(model, prompt)), pytest.raises(RuntimeError, match="listener gone"):
        model.generate(prompt, max_new_tokens=NEW, streamer=stream)
    assert stream.ends == 1


def test_a_stream_is_closed_when_the_prompt_is_refused(prompt: Tensor) -> None:
    small, stream = tiny.model("llama"), Recorder()
    small.config.max_position_embeddings = prompt.shape[1] - 1
    with patched(small, "lookup"), pytest.raises(ValueError, match="shorten the prompt"):
        small.generate(prompt, max_new_tokens=3, streamer=stream)
    assert stream.ends == 1


# Outputs


def test_scores_logits_and_cache_describe_the_text_that_is_returned(
    model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    given = {
        "max_new_tokens": NEW,
        "eos_token_id": reference[9],
        "pad_token_id": 0,
        "repetition_penalty": 1.01,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    wanted = plain(model, prompt, **given)
    for make in (oracle.chain(9), oracle.bushy(5, 2)):
        with patched(model, knows(model, prompt, make=make)):
            found = model.generate(prompt, **given)
        assert torch.equal(found.sequences, wanted.sequences)
        count = found.sequences.shape[1] - prompt.shape[1]
        assert len(found.scores) == len(found.logits) == count == len(wanted.scores)
        for mine, theirs in zip(found.scores + found.logits, wanted.scores + wanted.logits, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert torch.allclose(mine, theirs, atol=1e-4)
        assert found.cache.get_seq_length() == wanted.cache.get_seq_length() == found.sequences.shape[1] - 1
        keys = zip(found.cache.layers, wanted.cache.layers, strict=True)
        assert all(torch.allclose(a.keys, b.keys, atol=1e-5) for a, b in keys)


def test_scores_of_a_padded_batch(model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (5, 9)])
    given = {"attention_mask": mask, "max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True}
    wanted = plain(model, ids, **given)
    with patched(model, knows(model, ids, mask)):
        found = model.generate(ids, **given)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.logits is None
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_recorded_logits_hold_no_memory_but_their_own(model: PreTrainedModel, prompt: Tensor) -> None:
    with patched(model, knows(model, prompt, make=oracle.chain(9))):
        found = model.generate(prompt, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
    assert all(step.untyped_storage().nbytes() == tiny.VOCAB * 4 for step in found.logits)


def test_a_returned_cache_serves_a_second_turn(model: PreTrainedModel, prompt: Tensor) -> None:
    with patched(model, knows(model, prompt)):
        first = model.generate(prompt, max_new_tokens=8, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, tiny.text(1, 4, seed=8)], 1)
        with pytest.warns(UserWarning, match="cache of the caller's own"):
            second = model.generate(longer, max_new_tokens=8, cache=first.cache)
    assert torch.equal(second, plain(model, longer, max_new_tokens=8))


# What cannot be honoured


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda m, ids: {"use_cache": False}, "use_cache=False"),
        (lambda m, ids: {"cache_implementation": "static"}, "cache_implementation='static'"),
        (lambda m, ids: {"cache": DynamicCache(config=m.config)}, "cache of the caller's own"),
        (lambda m, ids: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        (lambda m, ids: {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        (lambda m, ids: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
        (lambda m, ids: {"position_ids": torch.arange(3, 3 + ids.shape[1])[None]}, "position_ids"),
    ],
    ids=["use_cache", "static", "own cache", "attentions", "hidden states", "guidance", "positions"],
)
def test_it_falls_back_to_plain_decoding_with_a_warning(
    given: Callable[[Any, Tensor], dict[str, Any]], reason: str, model: PreTrainedModel, prompt: Tensor
) -> None:
    wanted = plain(model, prompt, max_new_tokens=9, **given(model, prompt))
    with patched(model, knows(model, prompt)), pytest.warns(UserWarning, match=reason):
        found = model.generate(prompt, max_new_tokens=9, **given(model, prompt))
    sequences = [x if isinstance(x, Tensor) else x.sequences for x in (found, wanted)]
    assert torch.equal(*sequences)
    if not isinstance(found, Tensor):
        assert (found.attentions is None) == (wanted.attentions is None)
        assert (found.hidden_states is None) == (wanted.hidden_states is None)


def test_input_embeddings_fall_back_to_plain_decoding_with_a_warning(model: PreTrainedModel, prompt: Tensor) -> None:
    embedded = model.get_input_embeddings()(prompt)
    wanted = plain(model, inputs_embeds=embedded, max_new_tokens=9)
    with patched(model, "lookup"), pytest.warns(UserWarning, match="inputs_embeds"):
        found = model.generate(inputs_embeds=embedded, max_new_tokens=9)
    assert torch.equal(found, wanted)


def test_right_padding_falls_back_to_plain_decoding_with_a_warning(model: PreTrainedModel) -> None:
    ids = tiny.text(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    wanted = plain(model, ids, attention_mask=mask, max_new_tokens=5)
    with patched(model, "lookup"), pytest.warns(UserWarning, match="padding that is not on the left"):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5), wanted)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"assistant_model": "self"}, "assistant_model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(
    given: dict[str, Any], name: str, model: PreTrainedModel, prompt: Tensor
) -> None:
    if "assistant_model" in given:
        given = {"assistant_model": model}
    with patched(model, "lookup"), pytest.raises(ValueError, match=name):
        model.generate(prompt, max_new_tokens=4, **given)


def test_an_unknown_argument_is_refused_by_name(model: PreTrainedModel, prompt: Tensor) -> None:
    with patched(model, "lookup"), pytest.raises(ValueError, match="no_such_thing"):
        model.generate(prompt, max_new_tokens=4, no_such_thing=1)


def test_an_empty_prompt_is_refused_plainly(model: PreTrainedModel) -> None:
    with patched(model, "lookup"), pytest.raises(UnsupportedGeneration, match="at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=4)


def test_a_prompt_of_padding_only_is_refused_plainly(model: PreTrainedModel, prompt: Tensor) -> None:
    with patched(model, "lookup"), pytest.raises(UnsupportedGeneration, match="at least one token"):
        model.generate(prompt, attention_mask=torch.zeros_like(prompt), max_new_tokens=4)


def test_a_prompt_longer_than_the_model_is_made_for_is_refused_with_both_numbers(prompt: Tensor) -> None:
    small = tiny.model("llama")
    small.config.max_position_embeddings = 10
    with patched(small, "lookup"), pytest.raises(ValueError, match=r"12 tokens.*10"):
        small.generate(prompt, max_new_tokens=4)


def test_a_generator_is_not_lost_in_a_fall_back(model: PreTrainedModel, prompt: Tensor) -> None:
    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(5)
        given = {"do_sample": True, "max_new_tokens": 12, "use_cache": False, "generator": generator}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model.generate(prompt, **given)

    with patched(model, "lookup"):
        before = torch.get_rng_state()
        first = draw()
        assert torch.equal(first, draw())
        assert torch.equal(torch.get_rng_state(), before)


# The argument contract


def test_a_generation_config_object_and_positional_arguments(model: PreTrainedModel, prompt: Tensor) -> None:
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, pad_token_id=0)
    wanted = plain(model, prompt, config)
    before = config.to_dict(), model.generation_config.to_dict()
    with patched(model, knows(model, prompt)):
        assert torch.equal(model.generate(prompt, config), wanted)
        assert torch.equal(model.generate(inputs=prompt, generation_config=config), wanted)
        assert torch.equal(model.generate(input_ids=prompt, generation_config=config), wanted)
        assert torch.equal(model.generate(prompt, config, LogitsProcessorList()), wanted)
    assert (config.to_dict(), model.generation_config.to_dict()) == before


def test_the_text_generation_pipeline(
    model: PreTrainedModel, reference: list[int], prompt: Tensor, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = tokenizer.decode(prompt[0])
    wanted = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, max_new_tokens=9, do_sample=False)
    with patched(model, knows(model, prompt)):
        found = pipeline("text-generation", model=model, tokenizer=tokenizer)(text, max_new_tokens=9, do_sample=False)
        assert model.speculation.last.accepted > 0
    assert found == wanted
    assert found[0]["generated_text"].endswith(word(reference[8]))


def test_several_sequences_per_prompt(model: PreTrainedModel, prompt: Tensor) -> None:
    torch.manual_seed(0)
    with patched(model, knows(model, prompt)):
        found = model.generate(prompt, do_sample=True, num_return_sequences=3, max_new_tokens=12)
    assert found.shape == (3, prompt.shape[1] + 12)
    assert len({tuple(row) for row in found.tolist()}) == 3


def test_left_padding_changes_nothing_and_a_missing_mask_means_what_it_means_to_transformers(
    model: PreTrainedModel,
) -> None:
    short, long = tiny.text(1, 6, seed=2)[0].tolist(), tiny.text(1, 10, seed=3)[0].tolist()
    alone = plain(model, torch.tensor([short]), max_new_tokens=12)[0, 6:].tolist()
    padded, mask = oracle.left_padded([short, long])
    draft = knows(model, padded, mask)
    with patched(model, draft):
        one = model.generate(padded[:1], attention_mask=mask[:1], max_new_tokens=12, pad_token_id=0)
        both = model.generate(padded, attention_mask=mask, max_new_tokens=12, pad_token_id=0)
        ended = {"pad_token_id": alone[5], "eos_token_id": alone[5], "max_new_tokens": 12}
        same = model.generate(padded, attention_mask=mask, **ended)
        unmasked = model.generate(padded, max_new_tokens=12, pad_token_id=0)
        other = model.generate(padded, max_new_tokens=12, pad_token_id=96)
    assert one[0, 10:].tolist() == both[0, 10:].tolist() == alone
    assert torch.equal(same, plain(model, padded, attention_mask=mask, **ended))
    assert torch.equal(unmasked, plain(model, padded, max_new_tokens=12, pad_token_id=0))
    assert torch.equal(other, plain(model, padded, max_new_tokens=12, pad_token_id=96))


def test_no_warning_is_given_for_what_is_honoured(model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (5, 9)])
    with patched(model, knows(model, ids, mask)), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(ids, attention_mask=mask, max_new_tokens=5, pad_token_id=0)


# Chance


def test_seeds_are_honoured(model: PreTrainedModel, prompt: Tensor) -> None:
    table = torch.full((tiny.VOCAB, tiny.VOCAB), 1 / tiny.VOCAB)
    for draft in (knows(model, prompt), oracle.DrawnTree(table, (4, 2), False)):
        with patched(model, draft):

            def draw(generator: torch.Generator | None = None) -> list[int]:
                return model.generate(prompt, do_sample=True, max_new_tokens=12, generator=generator)[0].tolist()

            torch.manual_seed(7)
            first = draw()
            assert draw() != first, "unseeded calls differ"
            torch.manual_seed(7)
            assert draw() == first
            state = torch.get_rng_state()
            given = draw(torch.Generator().manual_seed(3))
            assert torch.equal(torch.get_rng_state(), state), "a generator of the caller's leaves the default alone"
            assert draw(torch.Generator().manual_seed(3)) == given


def test_equal_prompts_in_a_batch_are_sampled_apart(model: PreTrainedModel, prompt: Tensor) -> None:
    torch.manual_seed(1)
    with patched(model, "lookup"):
        rows = model.generate(prompt.repeat(2, 1), do_sample=True, max_new_tokens=12).tolist()
    assert rows[0] != rows[1]


def test_greedy_uses_no_randomness_and_no_other_generator_is_touched(model: PreTrainedModel, prompt: Tensor) -> None:
    state, python, numbers = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with patched(model, "lookup"):
        model.generate(prompt, max_new_tokens=12)
        assert torch.equal(torch.get_rng_state(), state)
        model.generate(prompt, max_new_tokens=12, do_sample=True)
    assert not torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python and numpy.random.get_state()[1].tolist() == numbers


# Independence


def test_calls_do_not_depend_on_earlier_calls(model: PreTrainedModel, prompt: Tensor) -> None:
    other = tiny.text(2, 20, seed=9)
    before = model(prompt).logits
    with patched(model, "lookup"):
        first = model.generate(prompt, max_new_tokens=NEW)
        assert torch.equal(model(prompt).logits, before)
        model.generate(other, max_new_tokens=5)
        assert torch.equal(model.generate(prompt, max_new_tokens=NEW), first)
        assert torch.equal(model(prompt).logits, before)


def test_the_model_may_change_dtype_and_attention_after_it_was_patched(prompt: Tensor) -> None:
    own = tiny.model("gemma3")
    wanted = plain(own, prompt, max_new_tokens=NEW)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(3, 2))):
        own.to(torch.float64)
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))
        own.to(torch.float32)
        own.set_attn_implementation("eager")
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


def test_weights_edited_after_the_patch_count(prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        own.generate(prompt, max_new_tokens=4)
        with torch.no_grad():
            own.lm_head.weight.copy_(own.lm_head.weight.roll(1, 0))
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))


@pytest.mark.parametrize("where", ["output head", "whole model"])
def test_hooks_of_others_that_change_the_logits_count(where: str, prompt: Tensor) -> None:
    own = tiny.model("llama")
    bias = torch.zeros(tiny.VOCAB)
    with patched(own, "lookup"):
        own.generate(prompt, max_new_tokens=4)
        if where == "output head":
            own.lm_head.register_forward_hook(lambda module, args, output: output + bias)
        else:

            def shift(module: Any, args: Any, output: Any) -> Any:
                output.logits = output.logits + bias
                return output

            own.register_forward_hook(shift)
        own.generate(prompt, max_new_tokens=4)
        bias += 3 * torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(0))
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))


def test_an_interrupt_in_mid_round_leaves_the_next_call_exact(
    model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    draft = Breaks(KeyboardInterrupt(), 2, knows(model, prompt))
    stream = Recorder()
    with patched(model, draft):
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt, max_new_tokens=NEW, streamer=stream)
        assert stream.ends == 1
        draft.at = -1
        assert model.generate(prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist() == reference


def test_an_interrupt_inside_the_target_leaves_the_next_call_exact(prompt: Tensor) -> None:
    own = tiny.model("llama")
    wanted = plain(own, prompt, max_new_tokens=NEW)
    calls = 0

    def interrupt(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    handle = own.model.layers[1].register_forward_pre_hook(interrupt)
    with patched(own, "lookup"):
        with pytest.raises(KeyboardInterrupt):
            own.generate(prompt, max_new_tokens=NEW)
        handle.remove()
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


def _together(jobs: list[Callable[[], Tensor]]) -> list[Any]:
    found: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        torch.set_num_threads(1)
        try:
            found[number] = jobs[number]()
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _slow(make: Any) -> Any:
    """The same guesses, with a pause that lets the other thread in."""

    def paused(*args: Any) -> oracle.Guess:
        time.sleep(0.001)
        guess: oracle.Guess = make(*args)
        return guess

    return paused


def test_two_threads_with_two_models_do_not_disturb_each_other() -> None:
    models = [tiny.model("llama", seed=1), tiny.model("gemma3", seed=2)]
    prompts = [tiny.text(1, 9, seed=4), tiny.text(2, 14, seed=5)]
    wanted = [plain(m, ids, max_new_tokens=40) for m, ids in zip(models, prompts, strict=True)]
    for own, text in zip(models, wanted, strict=True):
        selfspec.patch(own, Oracle(text.tolist(), _slow(oracle.bushy(3, 2))))
    found = _together(
        [lambda m=m, ids=ids: m.generate(ids, max_new_tokens=40) for m, ids in zip(models, prompts, strict=True)]
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert isinstance(mine, Tensor) and torch.equal(mine, theirs), mine


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup"])
def test_one_model_may_be_used_by_two_threads_at_once(kind: str) -> None:
    from test_exactness import DRAFTS

    own = tiny.model("llama", seed=3)
    prompts = [tiny.text(1, 9, seed=4), tiny.text(1, 14, seed=5)]
    wanted = [plain(own, ids, max_new_tokens=40) for ids in prompts]
    selfspec.patch(own, DRAFTS[kind](own, [], 3))
    found = _together([lambda ids=ids: own.generate(ids, max_new_tokens=40) for ids in prompts])
    for mine, theirs in zip(found, wanted, strict=True):
        assert isinstance(mine, Tensor) and torch.equal(mine, theirs), mine
    report = own.speculation.report()
    assert report["rows"] == 2 and report["new_tokens"] == 80


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


# Memory


def _tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def test_nothing_is_left_behind_by_calls(prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        for _ in range(3):
            own.generate(prompt, max_new_tokens=12)
        before = _tensors()
        for _ in range(10):
            own.generate(prompt, max_new_tokens=12)
        assert _tensors() <= before


def test_during_a_long_generation_only_the_cache_is_kept_and_no_graph(prompt: Tensor) -> None:
    own = tiny.model("llama").requires_grad_(True)
    counts: list[int] = []

    class Watch(oracle.Scripted):
        def observe(self, state: Any, verified: Verified) -> Any:
            if state.round % 50 == 49:
                counts.append(_tensors())
            return super().observe(state, verified)

        def tree(self, state: Any, budget: Any, generator: Any) -> Any:
            return oracle.as_tree([oracle.chain(2)(tokens[-1], [], 0, 0) for tokens in state.tokens])

    with patched(own, Watch()):
        found = own.generate(prompt, max_new_tokens=200)
    assert len(counts) >= 3
    assert max(counts[1:]) <= counts[1] + 5, counts
    assert not found.requires_grad


# Patching and unpatching


def _marks(model: PreTrainedModel) -> dict[str, Any]:
    hooks = {
        (name, kind): len(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks")
    }
    return {
        "attributes": set(vars(model)),
        "hooks": hooks,
        "generate": model.generate.__func__,
        "keys": set(model.state_dict()),
    }


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "oracle chain"])
def test_unpatch_leaves_the_model_as_it_was(kind: str, prompt: Tensor) -> None:
    from test_exactness import DRAFTS

    own = tiny.model("llama")
    weights = {name: value.clone() for name, value in own.state_dict().items()}
    draft = DRAFTS[kind](own, [[0]], 2)
    before = _marks(own)
    selfspec.patch(own, draft)
    own.generate(prompt, max_new_tokens=6)
    assert set(own.state_dict()) == before["keys"], "the draft is no part of the model"
    selfspec.unpatch(own)
    assert _marks(own) == before
    assert all(torch.equal(value, weights[name]) for name, value in own.state_dict().items())
    selfspec.unpatch(own)
    assert _marks(own) == before


def test_a_model_without_a_decoder_of_its_own_is_refused() -> None:
    """transformers then calls the whole model its base: its logits would be taken for hidden states."""
    whole = tiny.model("llama")
    whole.base_model_prefix = "nothing"
    with pytest.raises(UnsupportedModel, match="no decoder apart"):
        selfspec.patch(whole, "lookup")


def test_a_class_is_no_draft(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="Scripted is a class"):
        selfspec.patch(model, oracle.Scripted)  # type: ignore[arg-type]


def test_patching_twice_replaces_the_draft(model: PreTrainedModel, prompt: Tensor, reference: list[int]) -> None:
    before = _marks(model)
    selfspec.patch(model, "lookup")
    selfspec.patch(model, knows(model, prompt))
    assert model.speculation.draft.kind == "oracle"
    assert model.generate(prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist() == reference
    selfspec.unpatch(model)
    assert _marks(model) == before


def test_a_patch_that_fails_leaves_the_earlier_one_in_place(model: PreTrainedModel) -> None:
    before = _marks(model)
    selfspec.patch(model, "lookup")
    earlier = model.speculation
    for wrong in ("no/such-folder/at/all", object(), "medusa"):
        with pytest.raises(ValueError):
            selfspec.patch(model, wrong)
        assert model.speculation is earlier
    selfspec.unpatch(model)
    assert _marks(model) == before


def test_a_generate_that_others_put_on_the_model_is_given_back() -> None:
    own = tiny.model("llama")

    def other(*args: Any, **kwargs: Any) -> str:
        return "other"

    own.generate = other
    selfspec.patch(own, "lookup")
    selfspec.unpatch(own)
    assert own.generate is other


def test_what_is_no_draft_is_refused_by_what_it_lacks(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="observe"):
        selfspec.patch(model, object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trained first"):
        selfspec.patch(model, "medusa")
    with pytest.raises(ConfigError, match="nodes=0"):
        selfspec.patch(model, "lookup", nodes=0)
    assert "generate" not in vars(model)


def test_heads_of_another_base_model_are_refused(tmp_path: Any, model: PreTrainedModel) -> None:
    from test_exactness import DRAFTS

    from selfspec.checkpoint import save_head

    save_head(DRAFTS["medusa"](tiny.model("llama", seed=9), [], 3), tmp_path / "heads")
    with pytest.raises(CheckpointError, match="trained on"):
        selfspec.patch(model, tmp_path / "heads")
    assert "generate" not in vars(model)


def test_a_head_object_of_another_base_model_is_refused(model: PreTrainedModel) -> None:
    from test_exactness import DRAFTS

    with pytest.raises(ConfigError, match="another model"):
        selfspec.patch(model, DRAFTS["medusa"](tiny.model("llama", seed=9), [], 3))


def test_an_attention_without_masks_is_refused_by_name() -> None:
    own = tiny.model("llama")
    own.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        selfspec.patch(own, "lookup")


def _small(kind: str, **options: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{"vocab_size": 97, "hidden_size": 32, "eos_token_id": None, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


STATEFUL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mamba2", {"num_hidden_layers": 2, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}, "Mamba2"),
        ("lfm2", {**STATEFUL, "layer_types": ["conv", "full_attention"]}, "lfm2.*conv"),
        ("falcon_h1", {**STATEFUL, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "falcon_h1.*hybrid"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "Bloom.*ALiBi"),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, "GPTNeo.*local"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "OpenAIGPT.*no cache"),
    ],
)
def test_models_that_cannot_follow_a_tree_are_refused_by_name(kind: str, options: dict[str, Any], message: str) -> None:
    own = _small(kind, **options)
    with pytest.raises(UnsupportedModel, match=message):
        selfspec.patch(own, "lookup")
    assert "generate" not in vars(own)


@pytest.mark.parametrize("new", [8, 30])
def test_text_that_crosses_the_switch_of_longrope_equals_plain_decoding(new: int, prompt: Tensor) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    own = _small(
        "phi3",
        **STATEFUL,
        pad_token_id=0,
        initializer_range=0.3,
        max_position_embeddings=128,
        original_max_position_embeddings=24,
        rope_parameters={**rope, "original_max_position_embeddings": 24},
    )
    wanted = plain(own, prompt, max_new_tokens=new)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(5, 2))), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(own.generate(prompt, max_new_tokens=new), wanted)
    assert any("longrope" in str(w.message) for w in said) == (prompt.shape[1] + new > 24)


def test_an_output_head_with_packed_weights(prompt: Tensor) -> None:
    """One token per pass: dynamic quantisation scales all tokens of a pass together, so wider passes round apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = torch.ao.quantization.quantize_dynamic(tiny.model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    wanted = plain(own, prompt, max_new_tokens=NEW)
    with patched(own, "lookup", nodes=1):
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


def test_adapters_on_the_target_count_in_every_state(prompt: Tensor) -> None:
    peft = pytest.importorskip("peft")
    own = tiny.model("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(own, config)
    with patched(own, "lookup"):
        on = wrapped.generate(input_ids=prompt, max_new_tokens=NEW)
        assert torch.equal(on, plain(own, prompt, max_new_tokens=NEW))
        with wrapped.disable_adapter():
            off = wrapped.generate(input_ids=prompt, max_new_tokens=NEW)
            assert torch.equal(off, plain(own, prompt, max_new_tokens=NEW))
    assert not torch.equal(on, off)


def test_a_saved_model_holds_nothing_of_the_patch(tmp_path: Any, prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        own.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(prompt, max_new_tokens=9), plain(own, prompt, max_new_tokens=9))
    assert not hasattr(again, "speculation")


def test_a_copy_of_a_patched_model_speaks_for_itself(prompt: Tensor) -> None:
    import copy

    own = tiny.model("llama")
    with patched(own, "lookup"):
        twin = copy.deepcopy(own)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.roll(1, 0))
        assert torch.equal(twin.generate(prompt, max_new_tokens=NEW), plain(twin, prompt, max_new_tokens=NEW))
        assert own.speculation.last is None, "the copy counts for itself"
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))
        selfspec.unpatch(twin)
        assert "generate" not in vars(twin)
