"""The argument contract of `generate`, and where chance comes from."""

from __future__ import annotations

import random
import warnings

import numpy
import oracle
import tiny
import torch
from generate_tools import knows, word
from oracle import patched, plain
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

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
