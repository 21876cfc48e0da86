"""A reduced draft vocabulary: the few thousand tokens a draft may propose.

The target's full output head is a large part of a forward pass (Gemma-3-270M: 40%), so a draft that reads it once per
step cannot be cheap. The choice of tokens changes how often drafts are right, never what the target says.
Frequency-ranked vocabularies for drafts: Zhao et al. 2025 (FR-Spec), Li et al. 2025 (EAGLE-3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfspec.errors import ConfigError


class DraftVocab(nn.Module):
    """The map between a draft's columns and the target's token ids.

    Args:
        size: Q, the number of draft columns.
        target_size: V, the number of the target's logits.

    The buffer `ids` (`[Q]` int64, ascending) is saved with the head.
    """

    ids: Tensor

    def __init__(self, size: int, target_size: int) -> None:
        super().__init__()
        if not 0 < size <= target_size:
            raise ConfigError(f"a draft vocabulary of {size} does not fit a target vocabulary of {target_size}")
        self.target_size = target_size
        self.register_buffer("ids", torch.arange(size))

    @property
    def size(self) -> int:
        """Q."""
        return self.ids.numel()

    def set_ids(self, ids: Tensor) -> None:
        """Choose the tokens: `[Q]` distinct ids of the target, in any order."""
        ids = ids.to(self.ids.device, torch.long).unique(sorted=True)
        if ids.numel() != self.size or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise ConfigError(
                f"the draft vocabulary wants {self.size} distinct ids in 0..{self.target_size - 1}, got {ids.numel()} "
                f"from {int(ids[0])} to {int(ids[-1])}"
            )
        self.ids.copy_(ids)

    def to_target(self, columns: Tensor) -> Tensor:
        """Draft columns to target ids, any shape."""
        return self.ids[columns]


def most_frequent(counts: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The `size` most frequent tokens, `[size]` int64 ascending.

    Args:
        counts: `[V]`, how often each token occurs in the training text.
        size: how many to choose; ties go to the lower id.
        always: ids that must be in, for instance the end token.
    """
    if size > counts.numel():
        raise ConfigError(f"cannot choose {size} tokens out of {counts.numel()}; lower the draft vocabulary's size")
    weight = counts.to(torch.float64).clone()
    outside = [token for token in always if not 0 <= token < counts.numel()]
    if outside:
        raise ConfigError(f"tokens {outside} cannot always be in: the target's ids are 0..{counts.numel() - 1}")
    if always:
        weight[torch.tensor(always)] = float("inf")
    return weight.sort(descending=True, stable=True).indices[:size].sort().values
