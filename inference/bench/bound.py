"""What speed the machine allows: the cost of passes by themselves, and the acceptance that was reached.

A round costs one pass over the tree and the draft's own work, and brings `tokens_per_round` tokens. An engine that took
no time would write tokens_per_round / (pass + draft) tokens per second; with a draft that took none either,
tokens_per_round / pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from selfspec.draft import Needs
from selfspec.inference.runs import now
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape

SIZES = (1, 2, 4, 8, 16, 32)
_REPEATS = 5


@torch.no_grad()
def cost_curve(
    target: Target,
    text: Sequence[int],
    context: int,
    sizes: Sequence[int] = SIZES,
    repeats: int = _REPEATS,
    whole: bool = True,
) -> dict[int, float]:
    """Median seconds of one pass over a chain of so many nodes, by nodes; sizes take turns.

    Args:
        target: one without recurrent state, which passes would move on.
        text: what is read, again and again until it is long enough. Of arbitrary tokens a model knows so little that
            all tokens are about as likely, which a screened output head does not take for text.
        context: tokens in the cache.
        sizes: nodes per pass.
        repeats: passes of each size, after one that counts nowhere.
        whole: make all logits; else the likeliest tokens alone where they can be had without.
    """
    limit = target.max_positions
    context = max(1, context if limit is None else min(context, limit - max(sizes) - 1))
    cache = target.new_cache(1, context + max(sizes))
    length = context + max(sizes)
    tokens = torch.tensor([(list(text) * (length // len(text) + 1))[:length]], device=target.device)
    target.prefill(tokens[:, :context], [context], cache, Needs())
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            tree = DraftTree(tokens[:, context : context + size], TreeShape.chain(size - 1, target.device))
            start = now(target)
            out = target.verify(tree, cache, Needs())
            _ = out.logits if whole or out.likeliest() is None else None
            if turn:
                found[size].append(now(target) - start)
    return {size: median(times) for size, times in found.items()}


def bound(total: Stats, seconds: float, curve: dict[int, float] | None) -> dict[str, Any] | None:
    """The speeds that passes and acceptance allow, and the share of them that was reached.

    Args:
        total: rounds, acceptance and time by stage of a run.
        seconds: of the run without the prefill.
        curve: see `cost_curve`; without it there are only the bounds from the run's own passes.

    Returns:
        None for a run without rounds. `engine_free_tokens_per_s` comes from the run's own passes and drafts,
        `curve_tokens_per_s` takes the passes from the curve and `free_draft_tokens_per_s` leaves the draft out too;
        `reached` is the share of the first that was reached, `curve_reached` of the second.
    """
    stages = total.seconds
    models = stages["verify"] + stages["propose"] + stages["observe"]
    if not total.rounds or models <= 0 or seconds <= 0:
        return None
    rate, free = total.committed / seconds, total.committed / models
    found = {"engine_free_tokens_per_s": free, "reached": rate / free}
    if curve is None:
        return found
    nodes = 1 + total.proposed / total.rounds
    one_pass = float(np.interp(nodes, list(curve), list(curve.values())))
    draft = (stages["propose"] + stages["observe"]) / total.rounds
    with_draft = total.tokens_per_round / (one_pass + draft)
    return found | {
        "nodes_per_round": nodes,
        "pass_seconds": one_pass,
        "draft_seconds": draft,
        "curve_tokens_per_s": with_draft,
        "curve_reached": rate / with_draft,
        "free_draft_tokens_per_s": total.tokens_per_round / one_pass,
    }
