"""How well a draft does at what it is for: real speculative decoding of held-out prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import MaxLengthCriteria, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from selfspec.draft import Draft
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.selfcheck import checked_target
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.train.rows import plan_rows
from selfspec.train.settings import DistillConfig
from selfspec.train.traffic import TRAFFIC, traffic_rows

if TYPE_CHECKING:
    from selfspec.train.recipe import Recipe


def evaluate(
    model: PreTrainedModel | Target,
    tokenizer: PreTrainedTokenizerBase,
    draft: Draft,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    progress: bool = False,
) -> dict[str, Any]:
    """Decode prompts greedily with a draft, one after another, without stopping at end tokens.

    A head that is still in float32 is used as it is; acceptance may differ slightly from the saved head's.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        draft: any draft.
        prompts: text or token ids.
        max_new_tokens: tokens to write per prompt.
        progress: show a progress bar.

    Returns:
        `prompts`, `new_tokens`, `tokens_per_round` (the target's own token included; plain decoding has 1.0),
        `accepted_per_round` (without it), and `accepted_by_depth` (entry d: the share of rounds in which the draft was
        right at depth d + 1).
    """
    if not isinstance(model, Target):
        target = checked_target(model)
        try:
            return evaluate(target, tokenizer, draft, prompts, max_new_tokens, progress)
        finally:
            target.release()
    total = Stats()
    for prompt in tqdm(prompts, desc="evaluate", unit="prompt", disable=not progress):
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        limit = MaxLengthCriteria(max_length=len(ids) + max_new_tokens)
        request = Request(torch.tensor([ids], device=model.device), stopping=StoppingCriteriaList([limit]))
        total.add(decode(model, draft, request).stats)
    return {
        "prompts": len(prompts),
        "new_tokens": total.new_tokens,
        "tokens_per_round": total.tokens_per_round,
        "accepted_per_round": total.accepted_per_round,
        "accepted_by_depth": total.accepted_by_depth,
    }


def held_out_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of `evaluation.prompts` prompts from the held-out part of a recipe's sources, evenly from each."""
    wanted = recipe.evaluation.prompts
    pools = []
    for source in recipe.data:
        split = "held-out" if source.split == "train" else source.split
        if source.source.startswith(TRAFFIC):
            found = traffic_rows(source.source.removeprefix(TRAFFIC), split, source.split_seed)
            pools.append([ids[:prompt][-recipe.evaluation.prompt_tokens :] for ids, prompt in found])
            continue
        config = replace(
            DistillConfig(**{f.name: getattr(source, f.name) for f in fields(DistillConfig)}),
            mode="write",
            split=split,
            samples=1,
            length=max(source.length, recipe.evaluation.prompt_tokens + 1),
            prompt_tokens=recipe.evaluation.prompt_tokens,
            max_new_tokens=recipe.evaluation.max_new_tokens,
            max_tokens=wanted * (recipe.evaluation.prompt_tokens + recipe.evaluation.max_new_tokens),
        )
        pools.append([row.ids for row in plan_rows(tokenizer, config).rows])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pools))
    distinct = {tuple(ids): None for ids in turns if ids is not None}
    return [list(ids) for ids in distinct][:wanted]
