"""What to generate and what came out, for the engine and for the plain decoder alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from selfspec.accept import AcceptRule
from selfspec.draws import drawable
from selfspec.inference.prompt import Prompt, read_prompt
from selfspec.stats import Stats

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

_LONG = 192


@dataclass(eq=False)
class Request:
    """One call: prompts and how to go on from them. Letters: B rows, P prompt tokens.

    Args:
        input_ids: `[B, P]` int64, padded on the left; `[B, 0]` beside `embeds` alone.
        attention_mask: `[B, P]`, 0 for padding; None when there is none. It covers the columns of `cache` too.
        processors: logits processors, in transformers' order.
        stopping: stopping criteria; without a length limit the text must end in another way.
        do_sample: sample; otherwise greedy.
        temperature: as told to drafts (the processors apply it to the target).
        pad_token_id: fills rows that ended early.
        generator: randomness; None uses torch's default generator.
        streamer: gets every committed token once, in order, and nothing after a stop. One with a method `origin` is
            told before each token where it came from, per row: the depth of the draft's guess, 0 for the target.
        keep_scores: return the processed scores of every new token.
        keep_logits: return the raw logits of every new token.
        nodes: the most nodes per tree, the root included; None leaves it to the draft.
        accept: how sampled trees are judged.
        embeds: `[B, P, D]`, what the target reads in place of `input_ids`; None as a rule.
        cache: a DynamicCache of earlier text to go on from; `input_ids` may hold that text again or only what is new.
        keep_cache: return the target's keys and values.
        chunk: read the prompt in pieces of so many tokens.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    stopping: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    do_sample: bool = False
    temperature: float = 1.0
    pad_token_id: int | None = None
    generator: torch.Generator | None = None
    streamer: BaseStreamer | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    nodes: int | None = None
    accept: AcceptRule = field(default_factory=AcceptRule)
    embeds: Tensor | None = None
    cache: DynamicCache | None = None
    keep_cache: bool = False
    chunk: int | None = None

    @property
    def wants_likeliest(self) -> bool:
        """Whether nothing is asked of the target but its likeliest token at each node."""
        return not (self.do_sample or self.processors or self._wants_logits)

    @property
    def wants_draws(self) -> bool:
        """Whether drawing tokens without all logits is worth its preparations, for trees that were not drawn.

        A text that may be short is not: preparing takes as long as dozens of rounds. The same call decides alike at any
        time, so that a seed repeats its text.
        """
        if not (self.do_sample and drawable(self.processors)) or self._wants_logits:
            return False
        rooms = [rule.max_length for rule in self.stopping if isinstance(rule, MaxLengthCriteria)]
        room = min(rooms, default=_LONG) - self.input_ids.shape[1]
        return room * self.input_ids.shape[0] >= _LONG

    @property
    def _wants_logits(self) -> bool:
        return self.accept.lossy or self.keep_scores or self.keep_logits

    def prompt(self) -> Prompt:
        """What is to be read, without padding.

        Raises:
            UnsupportedGeneration: see `read_prompt`.
        """
        past = 0 if self.cache is None else self.cache.get_seq_length()
        return read_prompt(self.input_ids, self.attention_mask, self.embeds, past)


@dataclass(eq=False)
class Result:
    """What came out.

    Args:
        sequences: `[B, S]` int64, prompt included, rows that ended early padded on the right.
        stats: what it took.
        scores: per new token `[B, V]` float32, if asked for.
        logits: likewise, raw.
        cache: if asked for, keys and values of all but the last column of `sequences` (cached columns before them),
            `[B, H, S, d]` per layer, where transformers' own loop would have them; zeros under padding.
        origins: per row and new token, the depth at which the draft guessed it; 0 where the target gave it.
    """

    sequences: Tensor
    stats: Stats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    cache: list[tuple[Tensor, Tensor] | None] | None = None
    origins: list[list[int]] = field(default_factory=list)
