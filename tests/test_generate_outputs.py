"""Scores, logits and the cache describe the text that is returned."""

from __future__ import annotations

import oracle
import tiny
import torch
from generate_tools import NEW, knows
from oracle import patched, plain
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

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
