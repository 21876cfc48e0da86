"""The real small model (Gemma 3 270M of the `demo` extra): its text is unchanged by drafting.

Greedy in float32 token for token; in bfloat16 up to near-ties, which are shown with their margin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import selfspec
from selfspec.errors import ConfigError
from selfspec.models import load_target

sys.path.insert(0, str(Path(__file__).parents[1]))
import oracle

pytestmark = pytest.mark.real

PROMPTS = Path(__file__).parents[2] / ".." / "shared" / "data" / "spec_bench_dev.jsonl"
BUILT_IN = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The three largest rivers of Europe are the Volga, the Danube and",
    "Dear customer, we are sorry to hear that your parcel",
]
WINDOW = 512

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def prompts(count: int) -> list[str]:
    """Prompts of the bench file where it is at hand, built-in ones otherwise."""
    if not PROMPTS.is_file():
        return BUILT_IN[:count]
    lines = PROMPTS.read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:: max(1, len(lines) // count)][:count]]


def load(dtype: torch.dtype) -> Loaded:
    try:
        return load_target("demo", dtype=dtype)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def exact() -> Iterator[Loaded]:
    yield load(torch.float32)


@pytest.fixture(scope="module")
def rough() -> Iterator[Loaded]:
    yield load(torch.bfloat16)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, most: int = 80) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :most]
    return ids


def pair(loaded: Loaded, ids: Tensor, new: int, draft: Any = "lookup", **given: Any) -> tuple[Tensor, Tensor]:
    """The text of the patched model and that of transformers' own `generate`."""
    model, _ = loaded
    given = {"max_new_tokens": new, "do_sample": False, **given}
    wanted = oracle.plain(model, ids, **given)
    with oracle.patched(model, draft):
        return model.generate(ids, **given), wanted


@pytest.mark.parametrize("number", range(2))
def test_float32_is_identical(number: int, exact: Loaded) -> None:
    found, wanted = pair(exact, encode(exact[1], prompts(3)[number]), 40)
    assert torch.equal(found, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(20))
def test_float32_is_identical_on_twenty_prompts(number: int, exact: Loaded) -> None:
    if not PROMPTS.is_file():
        pytest.skip(f"{PROMPTS.name} is not at hand")
    found, wanted = pair(exact, encode(exact[1], prompts(20)[number], 400), 128)
    assert torch.equal(found, wanted)


def test_float32_is_identical_in_a_left_padded_batch(exact: Loaded) -> None:
    model, tokenizer = exact
    rows = [encode(tokenizer, text, most)[0].tolist() for text, most in zip(BUILT_IN, (30, 9, 14), strict=True)]
    ids, mask = oracle.left_padded(rows, tokenizer.pad_token_id)
    found, wanted = pair(exact, ids, 12, attention_mask=mask)
    assert torch.equal(found, wanted)


def test_rolling_back_beyond_the_sliding_window(exact: Loaded) -> None:
    """Half of the guesses are wrong, so every round moves and drops slots past the window of 512."""
    model, tokenizer = exact
    text = "\n".join(prompts(3) * 60)
    ids = encode(tokenizer, text, WINDOW + 40)
    assert ids.shape[1] == WINDOW + 40
    wanted = oracle.plain(model, ids, max_new_tokens=20, do_sample=False)
    vocab = model.config.get_text_config().vocab_size
    make = oracle.random_trees(3, 10, 0.7, ragged=False, vocab=vocab)
    with oracle.patched(model, oracle.Oracle(wanted.tolist(), make)):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), wanted)
        assert model.speculation.last.tokens_per_round > 1.3


def test_crossing_the_sliding_window_in_mid_text(exact: Loaded) -> None:
    model, tokenizer = exact
    ids = encode(tokenizer, "\n".join(prompts(3) * 60), WINDOW - 6)
    found, wanted = pair(exact, ids, 14)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("number", range(2))
def test_bfloat16_is_identical_or_parts_at_a_near_tie(number: int, rough: Loaded) -> None:
    ids = encode(rough[1], prompts(3)[number])
    found, wanted = pair(rough, ids, 40)
    if torch.equal(found, wanted):
        return
    width = min(found.shape[1], wanted.shape[1])
    place = int((found[0, :width] != wanted[0, :width]).nonzero()[0])
    with torch.no_grad():
        logits = rough[0](wanted[:, :place], logits_to_keep=1).logits[0, -1].float()
    picked = logits[[int(wanted[0, place]), int(found[0, place])]]
    margin = float((picked[0] - picked[1]).abs())
    # bfloat16 keeps 8 bits, so numbers of this size come in steps of size / 128; rounding of the sums adds a few.
    step = float(picked.abs().max()) / 128
    assert margin <= 4 * step, f"token {place} parts with a margin of {margin:.3f}, steps are {step:.3f}"
    print(f"near-tie at new token {place - ids.shape[1]}: margin {margin:.4f}, steps of {step:.4f}")


def test_sampling_is_repeatable_with_a_seed(rough: Loaded) -> None:
    model, tokenizer = rough
    ids = encode(tokenizer, BUILT_IN[0])
    with oracle.patched(model, "lookup"):
        runs = [
            model.generate(
                ids, max_new_tokens=12, do_sample=True, temperature=0.8, generator=torch.Generator().manual_seed(seed)
            ).tolist()
            for seed in (1, 1, 2)
        ]
    assert runs[0] == runs[1]
    assert not hasattr(model, "speculation")
    assert selfspec.__version__
