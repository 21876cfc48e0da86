"""Text ends exactly where plain decoding ends it. The judge is transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, Counter, StopAfter, knows, unused, word
from oracle import Oracle, patched, plain
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

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
