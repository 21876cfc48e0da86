"""What to generate and what came out, for the engine and for the plain decoder alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from selfspec.accept import AcceptRule
from selfspec.errors import UnsupportedGeneration
from selfspec.stats import Stats

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from selfspec.cache import SlotCache


@dataclass(eq=False)
class Request:
    """One call: prompts and how to go on from them. Letters: B rows, P prompt tokens.

    Args:
        input_ids: `[B, P]` int64, padded on the left.
        attention_mask: `[B, P]`, 0 for padding; None when there is none.
        processors: logits processors, in transformers' order.
        stopping: stopping criteria; without a length limit the text must end in another way.
        do_sample: sample; otherwise greedy.
        temperature: as told to drafts (the processors apply it to the target).
        pad_token_id: fills rows that ended early.
        generator: randomness; None uses torch's default generator.
        streamer: gets every committed token once, in order, and nothing after a stop.
        keep_scores: return the processed scores of every new token.
        keep_logits: return the raw logits of every new token.
        nodes: the most nodes per tree, the root included; None leaves it to the draft.
        accept: how sampled trees are judged.
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

    def compact(self) -> tuple[Tensor, list[int]]:
        """Prompts without their left padding: `[B, P']` padded on the right, and each row's length.

        Raises:
            UnsupportedGeneration: an empty prompt, or padding that is not all on the left.
        """
        ids = self.input_ids
        if ids.ndim != 2 or 0 in ids.shape:
            raise UnsupportedGeneration(f"the prompt has shape {tuple(ids.shape)}; give at least one token per row")
        if self.attention_mask is None:
            return ids, [ids.shape[1]] * ids.shape[0]
        mask = self.attention_mask.bool()
        counts = mask.sum(1)
        if not bool((mask == (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - counts[:, None])).all()):
            raise UnsupportedGeneration("padding inside or behind a prompt; pad on the left (padding_side='left')")
        if bool((counts == 0).any()):
            raise UnsupportedGeneration("a prompt of padding only; give at least one token per row")
        longest = int(counts.max())
        place = torch.arange(longest, device=ids.device) + (ids.shape[1] - counts)[:, None]
        return ids.gather(1, place.clamp(max=ids.shape[1] - 1)), counts.tolist()


@dataclass(eq=False)
class Result:
    """What came out.

    Args:
        sequences: `[B, S]` int64, prompt included, rows that ended early padded on the right.
        stats: what it took.
        scores: per new token `[B, V]` float32, if asked for.
        logits: likewise, raw.
        cache: the target's cache, holding all but the last token of each row; None once rows were dropped from it.
    """

    sequences: Tensor
    stats: Stats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    cache: SlotCache | None = None
