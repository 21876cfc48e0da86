"""What `selfspec distill` is to make."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from typing import Any

from selfspec.errors import ConfigError
from selfspec.train.chat import ANSWERS
from selfspec.train.corpus import SPLITS

MODES = ("label", "write")
FEATURE_DTYPES = ("bfloat16", "float8")
_NOT_CONTENT = ("batch_tokens", "batch_rows", "pack")


@dataclass(kw_only=True)
class DistillConfig:
    """What to make. Everything here is part of the dataset's identity except the sizes of batches and `pack`.

    Args:
        mode: `label` or `write`.
        source: `stdlib`, `traffic:FOLDER` (label only: what `patch(.., record=FOLDER)` wrote down), or a source of
            `selfspec.documents`; empty (write only): start from the beginning-of-text token.
        split: `train`, `held-out` or `all`.
        split_seed: another seed holds out other text.
        column: which field is read where records hold several.
        max_tokens: stop after this many tokens, prompts included.
        length: the most tokens of a row.
        turn: which user turn of `turns` is used alone, counted from 0; None uses all.
        answers: which answers of a conversation are learned, and written anew: `each` in its order, or the `last`.
        template: more for the chat template, as `{enable_thinking: false}`.
        today: the date (YYYY-MM-DD) that chat templates show, so that the text is the same every day.
        prompt_tokens: write: the longest prompt cut from a text. Prompts of a file stay whole, or are left out.
        max_new_tokens: write: tokens to add per prompt.
        samples: write: continuations per prompt.
        learn_prompt: write: learn from the prompt's tokens too.
        temperature: write: 0 is greedy.
        top_k: write: 0 keeps all.
        top_p: write: 1 keeps all.
        draft: write: heads, or a method that needs no training, to write faster with. Greedy text stays the same.
        seed: of everything drawn.
        predictions: store the target's first choice at each place, over its whole vocabulary.
        hidden: store the last hidden state, so that training needs no pass of the target.
        layers: store the inputs of these blocks likewise.
        feature_dtype: of stored features: `bfloat16`, or `float8` (e4m3, with one float32 scale per token).
        top_logits: store so many of the target's highest logits at each place, with their ids; heads learn from these
            then, instead of asking the target's output head. For draft vocabularies that are the target's own.
        shard_tokens: about this many tokens per shard; a killed run loses at most one shard.
        batch_tokens: tokens per pass of the target over whole sequences.
        batch_rows: write: rows written side by side.
        pack: read several rows as one in a pass of the target, with positions and attention of their own.
    """

    mode: str = "label"
    source: str = "stdlib"
    split: str = "train"
    split_seed: int = 0
    column: str = ""
    max_tokens: int = 100_000
    length: int = 512
    turn: int | None = None
    answers: str = "each"
    template: dict[str, Any] = field(default_factory=dict)
    today: str = "2026-01-01"
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    samples: int = 1
    learn_prompt: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft: str = ""
    seed: int = 0
    predictions: bool = False
    hidden: bool = False
    layers: list[int] = field(default_factory=list)
    feature_dtype: str = "bfloat16"
    top_logits: int = 0
    shard_tokens: int = 16_384
    batch_tokens: int = 2_048
    batch_rows: int = 32
    pack: bool = False

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        known = {"mode": MODES, "split": SPLITS, "answers": ANSWERS, "feature_dtype": FEATURE_DTYPES}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(values)}")
        try:
            datetime.date.fromisoformat(self.today)
        except ValueError as error:
            raise ConfigError(f"today is {self.today!r}, wanted a date as 2026-01-01") from error
        if self.mode == "label" and not self.source:
            raise ConfigError("mode 'label' needs a source of text; mode 'write' can do without")
        positive = "max_tokens length max_new_tokens samples prompt_tokens shard_tokens batch_tokens batch_rows"
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.top_logits < 0:
            raise ConfigError(f"top_logits is {self.top_logits}, wanted at least 0")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}: wanted >= 0, >= 0, in (0, 1]"
            )

    def content(self) -> dict[str, Any]:
        """The settings that the dataset's content depends on."""
        free = (*_NOT_CONTENT, "draft") if self.temperature == 0 else _NOT_CONTENT
        return {name: value for name, value in asdict(self).items() if name not in free}
