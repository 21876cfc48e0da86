"""Settings for all tests (one thread, no network), and the tiny model that the tests of `generate` share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("SELFSPEC_GUARD", "0")  # or most drafts here, which do not pay, would not be asked

import generate_tools
import pytest
import tiny
import torch
from oracle import plain
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import selfspec

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _llama() -> PreTrainedModel:
    return tiny.model("llama")


@pytest.fixture
def model(_llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A tiny Llama, unpatched after each test."""
    yield _llama
    selfspec.unpatch(_llama)


@pytest.fixture(scope="session")
def prompt() -> Tensor:
    """One prompt of 12 tokens."""
    return tiny.text(1, 12)


@pytest.fixture(scope="session")
def reference(_llama: PreTrainedModel, prompt: Tensor) -> list[int]:
    """The new tokens of plain decoding after `prompt`."""
    return plain(_llama, prompt, max_new_tokens=generate_tools.NEW)[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word `generate_tools.word(i)`."""
    return generate_tools.one_word_per_token()
