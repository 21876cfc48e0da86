"""Drawing tokens from distributions over large vocabularies.

`torch.multinomial` makes a random number for every token: over 262,144 tokens it takes twenty times as long as the
softmax before it. One uniform number and the running sum do the same.

Letters: K rows, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 512

NO_TOKEN = -1
"""Stands for a token where there was no distribution to draw it from."""


def wide(device: torch.device) -> torch.dtype:
    """The widest float of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of the probabilities passes a uniform number (inversion of the CDF).

    The sum is taken in blocks and in float64, so that only one block of each row has to be looked at token by token. A
    token of probability 0 is never drawn. Nothing waits for the device.

    Args:
        probs: `[K, V]` float32, not negative; rows need not sum to 1.
        uniform: `[K]`, in [0, 1), float64 where the device has it.

    Returns:
        `[K]` int64; NO_TOKEN in rows without a positive, finite sum.
    """
    rows, size = probs.shape
    blocks = -(-size // _BLOCK)
    parts = F.pad(probs, (0, blocks * _BLOCK - size)).view(rows, blocks, _BLOCK)
    upto = parts.sum(-1, dtype=uniform.dtype).cumsum(-1)
    total = upto[:, -1:]
    at = _below(uniform.unsqueeze(1) * total, total)
    block = (upto <= at).sum(-1, keepdim=True).clamp(max=blocks - 1)
    before = F.pad(upto, (1, 0)).gather(1, block)
    inner = parts[torch.arange(rows, device=probs.device), block.squeeze(1)].to(uniform.dtype).cumsum(-1)
    token = block * _BLOCK + (inner <= _below(at - before, inner[:, -1:])).sum(-1, keepdim=True)
    drawn = (total > 0) & total.isfinite()
    return torch.where(drawn, token, NO_TOKEN).squeeze(1)


def draw_often(weights: Tensor, uniform: Tensor) -> Tensor:
    """The same for several numbers and one row: `[V]` weights and `[M]` numbers to `[M]` int64.

    The weights have a positive, finite sum.
    """
    blocks = -(-weights.numel() // _BLOCK)
    parts = F.pad(weights, (0, blocks * _BLOCK - weights.numel())).view(blocks, _BLOCK)
    upto = parts.sum(-1, dtype=uniform.dtype).cumsum(-1)
    at = _below(uniform * upto[-1], upto[-1:])
    block = torch.searchsorted(upto, at, right=True).clamp(max=blocks - 1)
    inner = parts[block].to(uniform.dtype).cumsum(-1)
    at = _below(at - F.pad(upto, (1, 0))[block], inner[:, -1])
    return block * _BLOCK + (inner <= at.unsqueeze(1)).sum(-1)


def _below(value: Tensor, bound: Tensor) -> Tensor:
    """The value, or the largest number below the bound where rounding carried it there."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))
