"""What the tests of `generate` share: a draft that knows the text, listeners, and a tokenizer of one word per token."""

from __future__ import annotations

import gc
from typing import Any

import oracle
import tiny
import torch
from oracle import Oracle, plain
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

NEW = 24


def knows(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, make: Any = None, new: int = NEW) -> Oracle:
    """A draft that knows the free continuation of these prompts."""
    text = plain(model, ids, attention_mask=mask, max_new_tokens=new, eos_token_id=None)
    return Oracle(oracle.unpadded(text, mask), make or oracle.chain(5))


def unused(tokens: list[int]) -> int:
    """A token that does not occur."""
    return next(t for t in range(tiny.VOCAB - 1, 0, -1) if t not in tokens)


class Counter:
    """Forward passes of the target that use a cache, and their widths."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.widths: list[int] = []
        self.handle = model.model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("cache") is not None:
            self.widths.append(kwargs["input_ids"].shape[1])


def one_word_per_token() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i is the word `word(i)`."""
    # transformers finds out how tokens join by putting "abcdef" in front of them.
    words = {word(i): i for i in range(tiny.VOCAB)} | {"abcdef": tiny.VOCAB}
    made = Tokenizer(WordLevel(words, unk_token=word(0)))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=word(0), unk_token=word(0))


def word(token: int) -> str:
    return f"w{token:02d}"


class StopAfter(StoppingCriteria):
    """Stops after a token; `as_bool` answers with a Python bool, as older code does."""

    row_independent = True

    def __init__(self, token: int, as_bool: bool) -> None:
        self.token = token
        self.as_bool = as_bool
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids[0].tolist())
        found = input_ids[:, -1] == self.token
        return bool(found.all()) if self.as_bool else found


class Recorder(BaseStreamer):
    def __init__(self, fail_at: int | None = None) -> None:
        self.parts: list[list[int]] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())
        if self.fail_at is not None and len(self.parts) > self.fail_at:
            raise RuntimeError("listener gone")

    def end(self) -> None:
        self.ends += 1


class Breaks(oracle.Scripted):
    """A draft that fails in a given round."""

    def __init__(self, error: BaseException, at: int, inner: Oracle) -> None:
        self.error = error
        self.at = at
        self.inner = inner

    def tree(self, state: Any, budget: Any, generator: Any) -> Any:
        if state.round == self.at:
            raise self.error
        return self.inner.tree(state, budget, generator)


def tensors_alive() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
