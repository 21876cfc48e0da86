"""Greedy text of a draft against plain decoding, each first difference judged by the model's own rounding noise.

A pass over n tokens rounds otherwise than n passes over one token, in every dtype. How far the logits move by that is
measured on the model itself, through its own `forward`. Two tokens whose logits are closer than twice that noise, or
closer than a few units in the last place of a half-precision dtype, may change places: a tie. Anything else is a real
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from selfspec.draft import Draft
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.inference.runs import Job, draft_runner, prepare, run_plain, run_transformers
from selfspec.inference.stopping import Stopper
from selfspec.inference.verdict import NEAR_TIE, Difference, compare
from selfspec.target import Target

_PENALTY = {"repetition_penalty": 1.3}
_NOISE_TOKENS = 8
_BATCH = 4
_PAD = 0


def noise_floor(target: Target, text: Sequence[int], new: int = _NOISE_TOKENS) -> float:
    """The largest difference of a logit between one pass over the last `new` tokens and as many passes over one."""
    new = min(new, len(text) - 1)
    model: Any = target.model
    ids = torch.tensor([list(text)], device=target.device)
    with torch.no_grad():
        caches = [DynamicCache(config=target.config) for _ in range(2)]
        for cache in caches:
            model(input_ids=ids[:, :-new], cache=cache, use_cache=True)
        together: Tensor = model(input_ids=ids[:, -new:], cache=caches[0], use_cache=True).logits[0]
        first = ids.shape[1] - new
        worst = 0.0
        for place in range(new):
            token = ids[:, first + place : first + place + 1]
            alone: Tensor = model(input_ids=token, cache=caches[1], use_cache=True).logits[0, -1]
            worst = max(worst, float((alone.float() - together[place].float()).abs().max()))
    return worst


def greedy_check(target: Target, draft: Draft, prompts: Sequence[list[int]], max_new_tokens: int) -> dict[str, Any]:
    """Compare on every prompt, in turn as it is, with a repetition penalty, and with an end token inside the text.

    The first prompts are also decoded as one left-padded batch whose rows end at different places.
    """
    noise, texts, plain_texts = 0.0, [], []
    for index, prompt in enumerate(prompts):
        free = run_plain(_job(target, prompt, max_new_tokens, {})).tokens
        plain_texts.append(free)
        noise = max(noise, noise_floor(target, [*prompt, *free]))
        variant, extra = _variant(index, free)
        plain = None if extra is _PENALTY else _ended(free, {extra["eos_token_id"]}) if extra else free
        found = _compare(_job(target, prompt, max_new_tokens, extra), draft, plain)
        texts.append({"prompt": index, "variant": variant, **found})
    texts += _batch(target, draft, prompts[:_BATCH], plain_texts[:_BATCH], max_new_tokens)
    for text in texts:
        text["differences"] = {name: _classed(found, noise) for name, found in text["differences"].items()}
    classes = [found["class"] for text in texts for found in text["differences"].values() if found is not None]
    return {
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": len(prompts),
        "noise_floor": noise,
        "tie_margin": 2 * noise,
        "texts": texts,
        "compared_tokens": sum(text["tokens"] for text in texts),
        "tokens_per_round": sum(text["tokens"] for text in texts) / max(sum(t["rounds"] for t in texts), 1),
        "ties": classes.count("tie"),
        "real_differences": classes.count("real"),
        "passed": "real" not in classes,
    }


def _variant(index: int, free: list[int]) -> tuple[str, dict[str, Any]]:
    if index % 3 == 1:
        return "repetition penalty 1.3", _PENALTY
    if index % 3 == 2:
        return "end token inside the text", {"eos_token_id": free[2 * len(free) // 3]}
    return "as it is", {}


def _job(target: Target, prompt: list[int], max_new_tokens: int, extra: dict[str, Any]) -> Job:
    arguments = {"do_sample": False, "max_new_tokens": max_new_tokens, "top_p": 1.0, "top_k": 50, "temperature": 1.0}
    arguments |= extra
    return Job(target, prompt, prepare(target, prompt, arguments), arguments, 0)


def _compare(job: Job, draft: Draft, plain: list[int] | None) -> dict[str, Any]:
    """`plain` is the text of plain decoding where it is known already."""
    fast = draft_runner(draft)(job)
    references = {"plain": run_plain(job).tokens if plain is None else plain}
    references["transformers"] = run_transformers(job).tokens
    processors = job.request.processors
    differences = {
        name: compare(job.target, job.prompt, reference, fast.tokens, processors)
        for name, reference in references.items()
    }
    return {"tokens": len(fast.tokens), "rounds": fast.stats.rounds + 1, "differences": differences}


def _batch(
    target: Target, draft: Draft, prompts: Sequence[list[int]], free: Sequence[list[int]], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Each row of a batch against its own plain text; the end token is one that ends the rows at different places."""
    if len(prompts) < 2:
        return []
    native = Stopper(_job(target, prompts[0], max_new_tokens, {}).request.stopping).end_tokens
    ends = {free[0][len(free[0]) // 3], *native}
    request = _batch_request(target, prompts, max_new_tokens, sorted(ends))
    result = decode(target, draft, request)
    found = []
    for row, (prompt, text) in enumerate(zip(prompts, free, strict=True)):
        wanted, tokens = _ended(text, ends), result.sequences[row, request.input_ids.shape[1] :].tolist()
        difference = None
        if tokens != wanted + [_PAD] * (len(tokens) - len(wanted)):
            difference = compare(target, prompt, wanted, _ended(tokens, ends)) or Difference(len(wanted), False)
        rounds = result.stats.rounds // len(prompts) + 1
        texts = {"prompt": row, "variant": "row of a batch", "tokens": len(wanted), "rounds": rounds}
        found.append({**texts, "differences": {"plain": difference}})
    return found


def _ended(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to and with the first end token."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)


def _batch_request(target: Target, prompts: Sequence[list[int]], max_new_tokens: int, ends: list[int]) -> Request:
    longest = max(map(len, prompts))
    ids = torch.tensor([[_PAD] * (longest - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    stopping = StoppingCriteriaList([MaxLengthCriteria(longest + max_new_tokens), EosTokenCriteria(ends)])
    return Request(ids, mask, stopping=stopping, pad_token_id=_PAD)


def _classed(found: Difference | None, noise: float) -> dict[str, Any] | None:
    if found is None:
        return None
    tie = found.verdict == NEAR_TIE or (found.margin is not None and found.margin <= 2 * noise)
    return {"class": "tie" if tie else "real", **{k: v for k, v in found.to_dict().items() if k != "verdict"}}
