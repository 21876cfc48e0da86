"""Several rows read as one by the target: no padding, positions and attention of their own.

Letters: P rows' tokens together, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.draft import Needs
from selfspec.errors import ConfigError
from selfspec.target import Target
from selfspec.target_output import TargetOutput


def packed_features(target: Target, rows: Sequence[Sequence[int]], needs: Needs) -> list[TargetOutput]:
    """What `Target.features` gives for each row alone, from one pass.

    Args:
        target: whose layers follow masks (no recurrent state, no mask of its own making).
        rows: token ids, at least one each.
        needs: which hidden states to return.

    Returns:
        Per row `hidden` and `layers` as `[1, T, D]`.

    Raises:
        ConfigError: the target cannot keep rows apart.
    """
    if target.chain_only:
        raise ConfigError(f"rows cannot be packed: {target.chain_only}; leave `pack` out")
    counts = [len(row) for row in rows]
    tokens = torch.tensor([[token for row in rows for token in row]], device=target.device)
    together = target.features(tokens, None, needs, blocks=counts)
    ends = torch.tensor(counts).cumsum(0).tolist()
    parts = []
    for end, count in zip(ends, counts, strict=True):
        here = slice(end - count, end)
        hidden = None if together.hidden is None else together.hidden[:, here]
        parts.append(TargetOutput(together.logits, hidden, tuple(layer[:, here] for layer in together.layers)))
    return parts
