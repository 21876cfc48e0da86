"""How a draft pass would have gone all over a text, with gradients: what adapters of draft passes learn from.

In decoding a draft pass sees the committed tokens through the keys and values of full passes, and the tokens of its own
round through its own. `replay` repeats that for a whole text cut into rounds, in one pass.

Letters: B rows, T places, D hidden size, S keys seen (T committed ones, then T of the draft pass).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.cache import SlotCache, SlotLayer
from selfspec.draft import Needs
from selfspec.errors import UnsupportedModel
from selfspec.masks import reaches
from selfspec.switches import Plan
from selfspec.target import Target


class _BesideLayer(SlotLayer):
    """Shows the committed keys and values, and those of the pass at hand behind them; keeps neither."""

    def __init__(self, committed: SlotLayer) -> None:
        super().__init__(committed.slots, committed.window)
        self.committed = committed
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`[B, H, T, d]` each to `[B, H, 2T, d]`."""
        count = self.slots.lengths[0]
        keys, values = self.committed.stored_keys[:, :, :count], self.committed.stored_values[:, :, :count]
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def replayable(target: Target) -> None:
    """Raise UnsupportedModel for a model whose layers read the keys of others; `target.passes` refuses the rest."""
    if any(isinstance(window, type) for window in target.windows):
        raise UnsupportedModel(
            f"in {target.model_type!r} some layers read the keys of others, which a replay of draft passes cannot show "
            "them; train draft heads for this model instead"
        )


def replay(target: Target, tokens: Tensor, starts: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Full passes over texts, and the draft passes of rounds that start at given places.

    Args:
        target: the model.
        tokens: `[B, T]` int64, padded on the right.
        starts: `[B, T]` int64, the place of the root of the round that each place belongs to, at most the place itself.
        plan: a checked one.

    Returns:
        The last hidden states after the final norm, `[B, T, D]` each: of the full pass, without gradient, and of the
        draft passes, with gradient to what the plan adds.
    """
    batch, count = tokens.shape
    cache = target.new_cache(batch, count)
    with torch.no_grad():
        full = target.prefill(tokens, [count] * batch, cache, Needs(hidden=True)).hidden
    assert full is not None
    beside = SlotCache([], batch, count, tokens.device)
    beside.slots = cache.slots
    beside.layers = [_BesideLayer(layer) for layer in cache.layers if isinstance(layer, SlotLayer)]
    mask = target.masks(lambda window: _seen(starts, window))
    positions = torch.arange(count, device=tokens.device).expand(batch, -1)
    return full, target.passes.learn(tokens, mask, positions, beside, plan)


def _seen(starts: Tensor, window: int | None) -> Tensor:
    """`[B, T, 2T]` bool: committed tokens before the round, and the round's own tokens up to the place."""
    line = torch.arange(starts.shape[1], device=starts.device)
    place, other, start = line.unsqueeze(1), line, starts.unsqueeze(-1)
    committed, drafted = other < start, (other >= start) & (other <= place)
    seen = torch.cat([committed, drafted], -1)
    return seen if window is None else seen & reaches(place, torch.cat([line, line]), window)


def rounds_of(tokens: Tensor, counts: Tensor, length: int) -> Tensor:
    """Cut texts into rounds of `length` places; `[B, T]` int64: where the round of each place starts.

    The first round of a row is as long as its tokens happen to say, so that over many texts every place comes at every
    depth, and the same text is always cut alike, whatever it is batched with.

    Args:
        tokens: `[B, T]` int64.
        counts: `[B]` int64, real places.
        length: of a round.
    """
    line = torch.arange(tokens.shape[1], device=tokens.device)
    real = line < counts.unsqueeze(1)
    first = (tokens * real).sum(1, keepdim=True) % length
    start = first + (line - first).div(length, rounding_mode="floor") * length
    return start.clamp_min(0)
