"""Prompts given as embeddings. The judge is transformers' own `generate`."""

from __future__ import annotations

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, knows
from oracle import patched, plain
from test_exactness import DRAFTS
from transformers import PreTrainedModel


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "oracle chain"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_embeddings_as_prompt_equal_plain_decoding_with_and_without_tokens(name: str, kind: str) -> None:
    own, prompt = tiny.model(name), tiny.text(1, 12)
    embeds = own.get_input_embeddings()(prompt) + 0.01
    wanted = plain(own, inputs_embeds=embeds, max_new_tokens=NEW)
    with patched(own, DRAFTS[kind](own, [prompt[0].tolist() + wanted[0].tolist()], 3)):
        alone = own.generate(inputs_embeds=embeds, max_new_tokens=NEW)
        assert own.speculation.last.rounds > 0
        both = own.generate(prompt, inputs_embeds=embeds, max_new_tokens=NEW)
        assert own.speculation.last.rounds > 0
    assert torch.equal(alone, wanted), "new tokens only"
    assert torch.equal(both, plain(own, prompt, inputs_embeds=embeds, max_new_tokens=NEW))
    assert torch.equal(both[:, prompt.shape[1] :], wanted)


def test_a_draft_is_shown_the_tokens_that_stand_beside_embeddings(model: PreTrainedModel) -> None:
    prompt = tiny.text(1, 12)
    with patched(model, knows(model, prompt)):
        model.generate(prompt, inputs_embeds=model.get_input_embeddings()(prompt), max_new_tokens=NEW)
        assert model.speculation.last.tokens_per_round > 4


@pytest.mark.parametrize("limit", ["max_new_tokens", "max_length"])
def test_padded_embeddings_and_both_kinds_of_limit(limit: str, model: PreTrainedModel) -> None:
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (5, 9)])
    embeds = model.get_input_embeddings()(ids)
    for given in ({}, {"input_ids": ids}):
        arguments = {"inputs_embeds": embeds, "attention_mask": mask, limit: 21, "return_dict_in_generate": True}
        wanted = plain(model, **arguments, **given)
        with patched(model, "lookup"):
            found = model.generate(**arguments, **given)
            assert model.speculation.last.rounds > 0
        assert torch.equal(found.sequences, wanted.sequences)
        assert found.cache.get_seq_length() == wanted.cache.get_seq_length()


def test_embeddings_beside_other_tokens_or_a_filled_cache_fall_back(model: PreTrainedModel) -> None:
    prompt = tiny.text(1, 9)
    embeds = model.get_input_embeddings()(prompt)
    first = plain(model, prompt, max_new_tokens=1, return_dict_in_generate=True)
    del first.sequences
    first.cache.crop(-2)
    wanted = plain(model, inputs_embeds=embeds, max_new_tokens=5)
    with patched(model, "lookup"), pytest.warns(UserWarning, match="beside a cache"):
        assert torch.equal(model.generate(inputs_embeds=embeds, cache=first.cache, max_new_tokens=5), wanted)
