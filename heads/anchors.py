"""Where the blocks of a block drafter start in training text, what each may see, and what teaches it.

Letters: B rows, T places, A anchors per row, S slots of a block, P taught places.
A block with anchor a starts with the text's token a, sees the target's features of tokens 0..a - 1, and its slot j >= 1
guesses token a + j. The target teaches that from place a + j - 1.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.draft import Verified


@dataclass(frozen=True, eq=False)
class Anchors:
    """Blocks of a batch.

    Args:
        places: `[B, A]` int64, at least 1.
        weight: `[B, A]` float32: how many blocks each stands for, so that sums over chosen anchors estimate sums over
            all; 0 for anchors that only fill up a row.
    """

    places: Tensor
    weight: Tensor

    def positions(self, slots: int) -> Tensor:
        """`[B, A * S]` int64: the position in the text of each slot."""
        line = torch.arange(slots, device=self.places.device)
        return (self.places.unsqueeze(-1) + line).flatten(1)

    def mask(self, places: int, slots: int, causal: bool) -> Tensor:
        """What the slots see of the T places and then of all slots, `[B, 1, A * S, T + A * S]` bool.

        Each block sees the text before its anchor and itself: all of itself, or up to the slot at hand.
        """
        line = torch.arange(places, device=self.places.device)
        context = (line < self.places.unsqueeze(-1)).repeat_interleave(slots, 1)
        block = torch.ones(slots, slots, dtype=torch.bool, device=line.device)
        if causal:
            block = block.tril()
        blocks = torch.block_diag(*[block] * self.places.shape[1])
        return torch.cat([context, blocks.expand(len(context), -1, -1)], -1).unsqueeze(1)


def choose_anchors(verified: Verified, taught: Tensor, depths: int, most: int, salt: Tensor) -> Anchors:
    """Anchors with something to learn in their block: all of them, or `most` of each row at random.

    The choice depends on the row's own text and on `salt` alone: not on the other rows, padding, process or history.

    Args:
        verified: whole sequences.
        taught: `[B, T]` bool, places where the target teaches.
        depths: guesses per block.
        most: anchors per row.
        salt: any tensor that changes from step to step, for instance some weights.
    """
    places = taught.shape[1]
    before = torch.nn.functional.pad(taught.long().cumsum(1), (1, 0))
    end = (torch.arange(places, device=taught.device) + depths).clamp_max(places)
    useful = before[:, end] > before[:, :-1]
    useful[:, 0] = False
    found = [row.nonzero().squeeze(1) for row in useful.cpu()]
    rows = [
        pick if len(pick) <= most else pick[_some(verified, b, len(pick), most, salt)] for b, pick in enumerate(found)
    ]
    width = max(1, *map(len, rows))
    chosen = torch.ones(len(rows), width, dtype=torch.long)
    weight = torch.zeros(len(rows), width)
    for b, row in enumerate(rows):
        chosen[b, : len(row)] = row
        weight[b, : len(row)] = len(found[b]) / max(len(row), 1)
    return Anchors(chosen.to(taught.device), weight.to(taught.device))


def _some(verified: Verified, row: int, count: int, most: int, salt: Tensor) -> Tensor:
    """Ascending indices of `most` out of `count`."""
    text = verified.tokens[row, : int(verified.counts[row])].cpu().numpy().tobytes()
    seed = zlib.crc32(text, zlib.crc32(salt.detach().float().cpu().numpy().tobytes()))
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values
