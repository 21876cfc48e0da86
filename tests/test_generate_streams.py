"""Streams get what plain decoding would put, and are closed once."""

from __future__ import annotations

import oracle
import pytest
import tiny
from generate_tools import NEW, Breaks, Recorder, knows
from oracle import patched, plain
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
)

# Streams


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


class Origins(Recorder):
    """Asks where tokens came from."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: list[list[int]] = []

    def origin(self, depths: list[int]) -> None:
        self.origins.append(depths)


def test_a_stream_may_ask_at_which_depth_each_token_was_drafted(model: PreTrainedModel, prompt: Tensor) -> None:
    stream = Origins()
    with patched(model, knows(model, prompt, make=oracle.chain(5, lambda row, turn: turn % 3))):
        model.generate(prompt, streamer=stream, max_new_tokens=8, eos_token_id=None)
    # The prompt is put first and comes from nowhere; the prefill and every round end with a token of the target.
    assert stream.origins == [[0], [0], [1], [0], [1], [2], [0], [0]]
    assert len(stream.parts) == 1 + len(stream.origins)


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
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=11, eos_token_id=None)
    small, stream = AutoModelForCausalLM.from_config(config).eval(), Recorder()
    with patched(small, "lookup"), pytest.raises(ValueError, match="shorten the prompt"):
        small.generate(prompt, max_new_tokens=3, streamer=stream)
    assert stream.ends == 1
