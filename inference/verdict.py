"""Is it still the same text? Greedy outputs compared token by token; a difference in half precision gets its margin.

In bfloat16 and float16 a pass over several tokens rounds otherwise than a pass over one, so two tokens that the model
holds for all but equal may change places. That is told from a fault by the gap between the two tokens' logits, in units
of the dtype's own resolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.draft import Needs
from selfspec.target import Target

NEAR_TIE_ULPS = 4.0
NEAR_TIE: Literal["near-tie"] = "near-tie"
Verdict = Literal[True, False, "near-tie"]


@dataclass(frozen=True)
class Difference:
    """The first place where two greedy texts part; what follows it cannot be compared.

    Args:
        place: how many new tokens are equal before it.
        verdict: "near-tie" or False.
        plain_token: what plain decoding wrote there; None if it had ended.
        other_token: what the other wrote; None if it had ended.
        margin: gap between the two tokens' logits (as float32) in a fresh pass over the plain text.
        ulps: the same in units of the last place of the larger logit in the model's dtype.
        top2_margin: gap between the two likeliest tokens.
        plain_probability: of the plain token, by a float32 softmax.
        other_probability: of the other token.
    """

    place: int
    verdict: Verdict
    plain_token: int | None = None
    other_token: int | None = None
    margin: float | None = None
    ulps: float | None = None
    top2_margin: float | None = None
    plain_probability: float | None = None
    other_probability: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.margin is None or self.ulps is None:
            return f"one of the texts ends after {self.place} tokens, the other goes on"
        kind = "a near-tie" if self.verdict == NEAR_TIE else "NOT a near-tie"
        return (
            f"new token {self.place}: {self.plain_token} and {self.other_token} have logits {self.margin:.4g} apart "
            f"({self.ulps:.1f} units in the last place), {kind}"
        )


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two token lists differ, None if they are equal."""
    for place, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return place
    return None if len(plain) == len(other) else min(len(plain), len(other))


def compare(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    processors: LogitsProcessorList | None = None,
) -> Difference | None:
    """Judge one greedy text against that of plain decoding; None when they are equal.

    Args:
        target: the model that wrote both.
        prompt: its tokens.
        plain: new tokens of plain decoding.
        other: new tokens to judge.
        processors: logits processors that were in use.
    """
    place = first_difference(plain, other)
    if place is None:
        return None
    if place >= min(len(plain), len(other)):
        ended = (None if place >= len(tokens) else tokens[place] for tokens in (plain, other))
        return Difference(place, False, *ended)
    logits = _fresh_logits(target, [*prompt, *plain[:place]], processors)
    return _judge(place, logits, plain[place], other[place], target.dtype)


def _fresh_logits(target: Target, tokens: list[int], processors: LogitsProcessorList | None) -> Tensor:
    """`[V]` float32: the scores after these tokens, from one pass without anything kept from before."""
    ids = torch.tensor([tokens], device=target.device)
    with torch.no_grad():
        logits = target.prefill(ids, [len(tokens)], target.new_cache(1, len(tokens)), Needs()).logits[:, -1].float()
    scores: Any = processors(ids, logits) if processors else logits  # type: ignore[arg-type]
    return scores[0]


def _judge(place: int, logits: Tensor, plain: int, other: int, dtype: torch.dtype) -> Difference:
    top2 = logits.topk(2).values
    margin = abs(float(logits[plain] - logits[other]))
    ulps = margin / resolution(max(abs(float(logits[plain])), abs(float(logits[other]))), dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    probabilities = logits.softmax(-1)
    return Difference(
        place,
        NEAR_TIE if half and ulps <= NEAR_TIE_ULPS else False,
        plain,
        other,
        margin,
        ulps,
        float(top2[0] - top2[1]),
        float(probabilities[plain]),
        float(probabilities[other]),
    )


def resolution(value: float, dtype: torch.dtype) -> float:
    """The unit in the last place of `value` in `dtype` (the step to the next number)."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(value, info.smallest_normal)))
    return float(info.eps * 2.0**exponent)


def overall(differences: Iterable[Difference | None]) -> Verdict:
    """One verdict over several texts: True when all are equal, False when any differs by more than a near-tie."""
    found = [difference.verdict for difference in differences if difference is not None]
    if not found:
        return True
    return False if False in found else NEAR_TIE
