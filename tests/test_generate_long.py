"""Long text: past the trained length, scaled rope, prompts read in pieces. Judge: transformers' own `generate`."""

from __future__ import annotations

import warnings
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import Counter, Recorder
from oracle import Oracle, patched, plain
from test_exactness import DRAFTS
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

LIMIT = 32
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": LIMIT // 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LIMIT // 2,
    },
}


def scaled(kind: str) -> PreTrainedModel:
    """A tiny Llama made for LIMIT tokens."""
    config = LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=LIMIT,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_theta": 10000.0, **ROPES[kind]},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [12, 40])
def test_text_past_the_trained_length_is_warned_of_and_exact(kind: str, length: int) -> None:
    own, prompt = scaled(kind), tiny.text(1, length)
    own(tiny.text(1, 3))  # dynamic rope remembers the longest text it has seen, until a short one comes
    wanted = plain(own, prompt, max_new_tokens=40)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(4, 2))):
        own(tiny.text(1, 3))
        with pytest.warns(UserWarning, match=f"made for {LIMIT}"):
            assert torch.equal(own.generate(prompt, max_new_tokens=40), wanted)
        speed = own.speculation.last.tokens_per_round
    assert speed > 4 if kind != "dynamic" else speed >= 1


def test_several_prompts_past_the_length_where_dynamic_rope_changes_fall_back() -> None:
    own, prompt = scaled("dynamic"), tiny.text(2, 12)
    wanted = plain(own, prompt, max_new_tokens=30)
    own(tiny.text(1, 3))
    with patched(own, "lookup"), pytest.warns(UserWarning, match="rope changes"):
        assert torch.equal(own.generate(prompt, max_new_tokens=30), wanted)
    with patched(own, "lookup"), warnings.catch_warnings():
        warnings.simplefilter("error")
        own.generate(prompt, max_new_tokens=12)


def test_a_table_of_positions_is_used_to_its_last_row_and_longer_prompts_are_refused_with_both_numbers() -> None:
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=20, eos_token_id=None, initializer_range=0.3
    )
    own, prompt = AutoModelForCausalLM.from_config(config).eval(), tiny.text(1, 12)
    wanted = plain(own, prompt, max_new_tokens=9)
    with patched(own, Oracle(wanted.tolist(), oracle.chain(6))):
        assert torch.equal(own.generate(prompt, max_new_tokens=9), wanted)
        stream = Recorder()
        with pytest.raises(ValueError, match=r"21 tokens.*20"):
            own.generate(tiny.text(1, 21), max_new_tokens=4, streamer=stream)
        assert stream.ends == 1


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "oracle bush"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_prompt_read_in_pieces_gives_the_same_text(name: str, kind: str) -> None:
    own = tiny.model(name)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (23, 9, 16)])
    wanted = plain(own, ids, attention_mask=mask, max_new_tokens=12)
    draft = DRAFTS[kind](own, oracle.unpadded(wanted, mask), 3)
    for piece in (5, 8, 23):
        with patched(own, draft):
            counter = Counter(own)
            found = own.generate(ids, attention_mask=mask, max_new_tokens=12, prefill_chunk_size=piece)
            counter.handle.remove()
        assert torch.equal(found, wanted)
        assert counter.widths[: 23 // piece] == [piece] * (23 // piece)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("piece", [None, 1000])
def test_a_prompt_of_8000_tokens(name: str, piece: int | None) -> None:
    own, prompt = tiny.model(name), tiny.text(1, 8000)
    own.config.max_position_embeddings = 10_000
    wanted = plain(own, prompt, max_new_tokens=60)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(5, 2))):
        assert torch.equal(own.generate(prompt, max_new_tokens=60, prefill_chunk_size=piece), wanted)
        assert own.speculation.last.tokens_per_round > 4
