"""Going on from a cache: chat turns, ragged batches, windows. The judge is transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, Counter, knows
from oracle import Oracle, patched, plain
from test_exactness import DRAFTS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import selfspec


def same_cache(mine: Any, theirs: Any, seen: Tensor | None = None, atol: float = 1e-4) -> None:
    """Layer by layer the same keys and values, where the mask `seen` (`[B, S]`) has a token."""
    assert type(mine) is type(theirs) and len(mine.layers) == len(theirs.layers)
    assert mine.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        assert type(a) is type(b) and a.keys.shape == b.keys.shape
        for left, right in ((a.keys, b.keys), (a.values, b.values)):
            where = torch.ones(left.shape[0], left.shape[2]) if seen is None else seen[:, -left.shape[2] :]
            assert torch.allclose(left * where[:, None, :, None], right * where[:, None, :, None], atol=atol)


def turns(model: PreTrainedModel, generate: Callable[..., Any], first: Tensor, more: list[Tensor], **given: Any) -> Any:
    """Several turns on one cache; returns every turn's sequences, and the cache."""
    text, cache, found = first, None, []
    for extra in [None, *more]:
        text = text if extra is None else torch.cat([text, extra], 1)
        kept = {} if cache is None else {"cache": cache}
        out = generate(text, return_dict_in_generate=True, **kept, **given)
        text, cache = out.sequences, out.cache
        found.append(text)
    return found, cache


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "oracle"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_chat_turns_on_a_returned_cache_equal_plain_turns(name: str, kind: str) -> None:
    own = tiny.model(name)
    more = [tiny.text(1, n, seed=n) for n in (5, 1, 11)]
    given = {"max_new_tokens": 9, "pad_token_id": 0}
    wanted, theirs = turns(own, lambda *a, **k: plain(own, *a, **k), tiny.text(1, 12), more, **given)
    text = wanted[-1].tolist()
    draft = Oracle(text, oracle.bushy(4, 2)) if kind == "oracle" else DRAFTS[kind](own, text, 3)
    with patched(own, draft):
        counter = Counter(own)
        found, mine = turns(own, own.generate, tiny.text(1, 12), more, **given)
        counter.handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    same_cache(mine, theirs)
    assert max(counter.widths) <= 12, "cached text is not read again"
    if kind == "oracle":
        assert own.speculation.last.tokens_per_round > 2 if hasattr(own, "speculation") else True


@pytest.mark.parametrize("form", ["whole text", "new tokens only"])
def test_a_cache_of_plain_decoding_is_taken_over_and_filled_in_place(form: str, model: PreTrainedModel) -> None:
    prompt, extra = tiny.text(1, 9), tiny.text(1, 4, seed=3)
    found = []
    for speculative in (False, True):
        first = plain(model, prompt, max_new_tokens=7, return_dict_in_generate=True)
        cache, text = first.cache, torch.cat([first.sequences, extra], 1)
        given: dict[str, Any] = {"cache": cache, "max_new_tokens": NEW}
        if form == "new tokens only":
            given["attention_mask"] = torch.ones_like(text)
            text = text[:, cache.get_seq_length() :]
        if speculative:
            with patched(model, knows(model, torch.cat([first.sequences, extra], 1))):
                found.append((model.generate(text, **given), cache))
        else:
            found.append((plain(model, text, **given), cache))
    assert torch.equal(found[0][0], found[1][0])
    same_cache(found[1][1], found[0][1])


def test_an_empty_cache_object_is_filled(model: PreTrainedModel, prompt: Tensor) -> None:
    for make in (DynamicCache, lambda: DynamicCache(config=model.config)):
        theirs, mine = make(), make()
        wanted = plain(model, prompt, max_new_tokens=7, cache=theirs)
        with patched(model, knows(model, prompt)):
            assert torch.equal(model.generate(prompt, max_new_tokens=7, cache=mine), wanted)
            assert model.speculation.last.accepted > 0
        same_cache(mine, theirs)


def test_what_comes_after_the_stop_is_not_left_in_the_cache(
    model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    for place in (2, 5, 8):
        given = {"max_new_tokens": NEW, "eos_token_id": reference[place], "pad_token_id": 0}
        wanted = plain(model, prompt, return_dict_in_generate=True, **given)
        with patched(model, knows(model, prompt, make=oracle.chain(16))):
            found = model.generate(prompt, return_dict_in_generate=True, **given)
        same_cache(found.cache, wanted.cache)


@pytest.mark.parametrize("mask_ends", [True, False], ids=["masked behind the end", "not masked"])
def test_a_ragged_batch_returns_a_cache_for_the_next_turn(mask_ends: bool, model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (4, 9, 6)])
    free = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)[:, ids.shape[1] :]
    given = {"max_new_tokens": NEW, "eos_token_id": int(free[0, 4]), "pad_token_id": 0}
    extra = tiny.text(3, 5, seed=7)

    def two_turns(generate: Callable[..., Any]) -> tuple[Any, Any, Tensor]:
        first = generate(ids, attention_mask=mask, return_dict_in_generate=True, **given)
        grown = first.sequences.shape[1] - ids.shape[1]
        behind = torch.ones(3, grown, dtype=torch.long)
        if mask_ends:
            for row in range(3):
                ends = (first.sequences[row, ids.shape[1] :] == given["eos_token_id"]).nonzero()
                if len(ends):
                    behind[row, int(ends[0]) + 1 :] = 0
        text = torch.cat([first.sequences, extra], 1)
        seen = torch.cat([mask, behind, torch.ones_like(extra)], 1)
        second = generate(text, attention_mask=seen, cache=first.cache, return_dict_in_generate=True, **given)
        return first, second, seen

    wanted = two_turns(lambda *a, **k: plain(model, *a, **k))
    draft = knows(model, ids, mask, oracle.chain(5, lambda row, turn: (2, 5, 0)[row]))
    with patched(model, draft):
        found = two_turns(model.generate)
        assert model.speculation.last.rounds > 0
    assert torch.equal(found[0].sequences, wanted[0].sequences)
    assert torch.equal(found[1].sequences, wanted[1].sequences)
    grown = found[1].cache.get_seq_length() - found[1].sequences.shape[1] + 1
    assert grown == 0
    tail = torch.ones(3, found[1].sequences.shape[1] - 1 - wanted[2].shape[1], dtype=torch.long)
    same_cache(found[1].cache, wanted[1].cache, torch.cat([wanted[2], tail], 1))


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_holes_in_the_mask_of_a_model_with_windows_fall_back(name: str) -> None:
    own, ids = tiny.model(name), tiny.text(2, 14)
    mask = torch.ones_like(ids)
    mask[0, 6:9] = 0
    wanted = plain(own, ids, attention_mask=mask, max_new_tokens=9)
    with patched(own, "lookup"), pytest.warns(UserWarning, match="padding inside"):
        assert torch.equal(own.generate(ids, attention_mask=mask, max_new_tokens=9), wanted)


def test_holes_in_the_mask_are_left_out_and_positions_go_on_without_them(model: PreTrainedModel) -> None:
    ids = tiny.text(2, 14)
    mask = torch.ones_like(ids)
    mask[0, 6:9] = 0
    mask[1, :2] = 0
    wanted = plain(model, ids, attention_mask=mask, max_new_tokens=NEW)
    with patched(model, "lookup"):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=NEW), wanted)
        assert model.speculation.last.rounds > 0


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_padded_batch_goes_on_past_the_window(name: str) -> None:
    own = tiny.model(name)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (12, 5)])
    more = [tiny.text(2, 3, seed=4)]

    def two(generate: Callable[..., Any]) -> list[Tensor]:
        first = generate(ids, attention_mask=mask, max_new_tokens=9, return_dict_in_generate=True)
        text = torch.cat([first.sequences, more[0]], 1)
        seen = torch.cat([mask, torch.ones(2, text.shape[1] - ids.shape[1], dtype=torch.long)], 1)
        second = generate(text, attention_mask=seen, cache=first.cache, max_new_tokens=9)
        return [first.sequences, second]

    wanted = two(lambda *a, **k: plain(own, *a, **k))
    with patched(own, Oracle(oracle.unpadded(wanted[1], mask), oracle.bushy(3, 2))):
        assert all(torch.equal(a, b) for a, b in zip(two(own.generate), wanted, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
def test_several_answers_need_a_cache_of_as_many_rows(rows: int, model: PreTrainedModel, prompt: Tensor) -> None:
    first = plain(model, prompt.repeat(rows, 1), max_new_tokens=3, return_dict_in_generate=True)
    text = torch.cat([first.sequences[:1], tiny.text(1, 2)], 1)
    with patched(model, "lookup"):
        if rows == 3:
            found = model.generate(
                text, cache=first.cache, max_new_tokens=4, do_sample=True, top_k=1, num_return_sequences=3
            )
            assert torch.equal(found, plain(model, text, max_new_tokens=4).repeat(3, 1))
        else:
            with pytest.warns(UserWarning, match="a cache of 1 rows for 3 prompts"), pytest.raises(RuntimeError):
                model.generate(
                    text, cache=first.cache, max_new_tokens=4, do_sample=True, top_k=1, num_return_sequences=3
                )


def test_a_cache_with_nothing_left_to_read_is_left_to_transformers(model: PreTrainedModel, prompt: Tensor) -> None:
    """A cache of the whole prompt: plain decoding then reads it once more, whatever that is worth."""
    selfspec.patch(model, "lookup")
    found = []
    for generate in (lambda *a, **k: plain(model, *a, **k), model.generate):
        cache = DynamicCache(config=model.config)
        model(prompt, cache=cache)
        if generate == model.generate:
            with pytest.warns(UserWarning, match="leaves nothing to read"):
                found.append(generate(prompt, cache=cache, max_new_tokens=4))
        else:
            found.append(generate(prompt, cache=cache, max_new_tokens=4))
    assert torch.equal(found[0], found[1])
