"""What `selfspec distill` is to make."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from selfspec.errors import ConfigError
from selfspec.train.corpus import SPLITS

MODES = ("label", "write")


@dataclass(kw_only=True)
class DistillConfig:
    """What to make. Everything here is part of the dataset's identity except the sizes of batches.

    Args:
        mode: `label` or `write`.
        source: `stdlib`, a file, a folder or a glob; empty (write only): start from the beginning-of-text token.
        split: `train`, `held-out` or `all`.
        max_tokens: stop after this many tokens, prompts included.
        length: the most tokens of a row.
        turn: which user turn of `turns`, counted from 0.
        prompt_tokens: write: the longest prompt cut from a text; longer prompts of a file are cut at the front.
        max_new_tokens: write: tokens to add per prompt.
        samples: write: continuations per prompt.
        learn_prompt: write: learn from the prompt's tokens too.
        temperature: write: 0 is greedy.
        top_k: write: 0 keeps all.
        top_p: write: 1 keeps all.
        seed: of everything drawn.
        predictions: store the target's first choice at each place, over its whole vocabulary.
        hidden: store the last hidden state, so that training needs no pass of the target.
        layers: store the inputs of these blocks likewise.
        shard_tokens: about this many tokens per shard; a killed run loses at most one shard.
        batch_tokens: tokens per pass of the target over whole sequences.
        batch_rows: write: rows written side by side.
    """

    mode: str = "label"
    source: str = "stdlib"
    split: str = "train"
    max_tokens: int = 100_000
    length: int = 512
    turn: int = 0
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    samples: int = 1
    learn_prompt: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    predictions: bool = False
    hidden: bool = False
    layers: list[int] = field(default_factory=list)
    shard_tokens: int = 16_384
    batch_tokens: int = 2_048
    batch_rows: int = 32

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        if self.mode not in MODES:
            raise ConfigError(f"distill mode {self.mode!r} is unknown; use one of {', '.join(MODES)}")
        if self.split not in SPLITS:
            raise ConfigError(f"split {self.split!r} is unknown; use one of {', '.join(SPLITS)}")
        if self.mode == "label" and not self.source:
            raise ConfigError("mode 'label' needs a source of text; mode 'write' can do without")
        positive = "max_tokens length max_new_tokens samples prompt_tokens shard_tokens batch_tokens batch_rows"
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}: wanted >= 0, >= 0, in (0, 1]"
            )

    def content(self) -> dict[str, Any]:
        """The settings that the dataset's content depends on."""
        return {name: value for name, value in asdict(self).items() if name not in ("batch_tokens", "batch_rows")}
