"""What cannot be honoured falls back with a warning or is refused by name, never ignored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from generate_tools import knows
from oracle import patched, plain
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

from selfspec.errors import UnsupportedGeneration

# What cannot be honoured


class OwnCache(DynamicCache):
    """What a subclass does to keys and values cannot be known."""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda m, ids: {"use_cache": False}, "use_cache=False"),
        (lambda m, ids: {"cache_implementation": "static"}, "cache_implementation='static'"),
        (lambda m, ids: {"cache": StaticCache(config=m.config, max_cache_len=40)}, "a StaticCache of the caller's own"),
        (lambda m, ids: {"cache": OwnCache(config=m.config)}, "a OwnCache of the caller's own"),
        (lambda m, ids: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        (lambda m, ids: {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        (lambda m, ids: {"position_ids": torch.arange(3, 3 + ids.shape[1])[None]}, "position_ids"),
    ],
    ids=["use_cache", "static", "own static", "a class of one's own", "attentions", "hidden states", "positions"],
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


@pytest.mark.parametrize("form", ["argument", "object"])
def test_an_offloaded_cache_is_left_to_transformers(form: str, model: PreTrainedModel, prompt: Tensor) -> None:
    given: dict[str, Any] = {"cache_implementation": "offloaded"}
    if form == "object":
        given = {"cache": DynamicCache(config=model.config, offloading=True)}
    with patched(model, "lookup"), pytest.warns(UserWarning, match="offloaded"):
        if torch.cuda.is_available():
            model.generate(prompt, max_new_tokens=4, **given)
        else:  # transformers itself needs a GPU for it
            with pytest.raises(AssertionError, match="CUDA"):
                model.generate(prompt, max_new_tokens=4, **given)


def test_a_callers_static_cache_is_filled_as_plain_decoding_would(model: PreTrainedModel, prompt: Tensor) -> None:
    theirs, mine = (StaticCache(config=model.config, max_cache_len=40) for _ in range(2))
    plain(model, prompt, max_new_tokens=6, cache=theirs)
    with patched(model, "lookup"), pytest.warns(UserWarning, match="StaticCache"):
        model.generate(prompt, max_new_tokens=6, cache=mine)
    assert mine.get_seq_length() == theirs.get_seq_length() == prompt.shape[1] + 5
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(mine.layers, theirs.layers, strict=True))


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
        ({"use_mtp": True}, "use_mtp"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
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
