"""The target writes: one small batched loop for training text, or the engine where there is a draft.

Letters: B rows, P prompt tokens, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.draft import Draft, Needs
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.target import Target
from selfspec.tree import DraftTree

_CANDIDATES = 1024


@dataclass(frozen=True)
class Picking:
    """How the target's tokens are picked.

    Args:
        temperature: 0 is greedy.
        top_k: keep this many tokens; 0 keeps all.
        top_p: of those, keep the fewest that hold this much probability; 1 keeps all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def write(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    picking: Picking,
    seeds: Sequence[int],
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """Continue prompts.

    A row's randomness comes from its own seed alone, so its text does not depend on when it is written.

    Args:
        target: the model.
        prompts: token ids, at least one each.
        max_new_tokens: the most tokens to add per row.
        picking: greedy or sampled.
        seeds: one per prompt.
        ends: a row stops behind any of these tokens.

    Returns:
        The new tokens of each row, the end token included.
    """
    counts = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([[*p, *[0] * (max(counts) - len(p))] for p in prompts], device=target.device)
    chances = torch.stack([torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(s)) for s in seeds])
    written: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    with torch.no_grad():
        cache = target.new_cache(len(prompts), max(counts) + max_new_tokens)
        logits = target.prefill(tokens, counts, cache, Needs()).logits[:, -1]
        for step in range(max_new_tokens):
            picked = pick(logits, chances[rows, step].to(logits.device), picking).tolist()
            for row, token in zip(rows, picked, strict=True):
                written[row].append(token)
            going = [i for i, token in enumerate(picked) if token not in ends]
            if not going or step == max_new_tokens - 1:
                break
            if len(going) < len(rows):
                cache.select(going)
                rows, picked = [rows[i] for i in going], [picked[i] for i in going]
            root = torch.tensor(picked, device=target.device)
            logits = target.verify(DraftTree.root_only(root), cache, Needs()).logits[:, -1]
            cache.commit([1] * len(rows))
    return written


def write_drafted(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    picking: Picking,
    seeds: Sequence[int],
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """As `write`, with guesses of a draft. Greedy text is the same; sampled text follows the same distribution.

    Sampled rows are written one by one, so that their randomness is their own.
    """
    alone = picking.temperature > 0 or target.chain_only
    size = 1 if alone else len(prompts)
    written: list[list[int]] = []
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        longest = max(map(len, part))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in part], device=target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=target.device)
        stopping = StoppingCriteriaList([MaxLengthCriteria(longest + max_new_tokens)])
        if ends:
            stopping.append(EosTokenCriteria(list(ends)))
        request = Request(
            ids,
            mask,
            _warpers(picking),
            stopping,
            do_sample=picking.temperature > 0,
            temperature=picking.temperature or 1.0,
            pad_token_id=0,
            generator=torch.Generator(target.device).manual_seed(seeds[start]),
        )
        written += [_until_end(row, ends) for row in decode(target, draft, request).sequences[:, longest:].tolist()]
    return written


def _warpers(picking: Picking) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if picking.temperature not in (0.0, 1.0):
        found.append(TemperatureLogitsWarper(picking.temperature))
    if picking.temperature and picking.top_k:
        found.append(TopKLogitsWarper(picking.top_k))
    if picking.temperature and picking.top_p < 1:
        found.append(TopPLogitsWarper(picking.top_p))
    return found


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    place = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: place + 1]


def batches(lengths: Sequence[int], most: int, by_rows: bool = False, padded: bool = True) -> Iterator[list[int]]:
    """Indices of rows of like length, with at most so many tokens (or rows) in a batch; one row may exceed it.

    Args:
        lengths: tokens of each row.
        most: tokens per batch, or rows.
        by_rows: count rows.
        padded: count padding too.
    """
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        size = lengths[index]
        full = len(batch) + 1 if by_rows else (len(batch) + 1) * size if padded else total + size
        if batch and full > most:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


def end_tokens(target: Target, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a text: those of the model's generation config and the tokenizer's."""
    config = getattr(target.model, "generation_config", None)
    known = getattr(config, "eos_token_id", None)
    ids = set(known if isinstance(known, (list, tuple)) else [known]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def pick(logits: Tensor, chances: Tensor, picking: Picking) -> Tensor:
    """One token per row, `[B]` int64.

    Sampling inverts the cumulative distribution at `chances`. With top-k or top-p the few best tokens are found first
    and all else is done on them: sorting a vocabulary of 262,144 costs more than the forward pass.

    Args:
        logits: `[B, V]`.
        chances: `[B]` in [0, 1).
        picking: as in transformers: temperature, then top-k, then top-p.
    """
    if picking.temperature == 0:
        return logits.argmax(-1)
    if not picking.top_k and picking.top_p >= 1:
        return _invert((logits.float() / picking.temperature).softmax(-1), chances)
    size = logits.shape[-1]
    scores, ids = logits.topk(min(picking.top_k or _CANDIDATES, size), dim=-1)
    scores = scores.float() / picking.temperature
    probs = scores.softmax(-1)
    if not picking.top_k:
        mass = (scores - (logits.float() / picking.temperature).logsumexp(-1, keepdim=True)).exp()
        if bool((mass.sum(-1) < picking.top_p).any()):  # the best candidates do not reach top-p: take them all
            scores, ids = (logits.float() / picking.temperature).sort(-1, descending=True)
            mass = scores.softmax(-1)
        probs = mass
    if picking.top_p < 1:
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= picking.top_p, 0.0)
    return ids.gather(-1, _invert(probs, chances).unsqueeze(-1)).squeeze(-1)


def _invert(probs: Tensor, chances: Tensor) -> Tensor:
    """The first place whose cumulative share of `probs` (`[B, K]`, need not sum to 1) exceeds `chances` (`[B]`)."""
    reached = probs.cumsum(-1)
    place = torch.searchsorted(reached, (chances * reached[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    last = (probs > 0).int().mul(torch.arange(1, probs.shape[-1] + 1, device=probs.device)).amax(-1) - 1
    return torch.minimum(place, last)
