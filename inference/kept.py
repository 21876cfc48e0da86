"""The cache that a caller gets back: rows that ended early are kept until the last one ends.

Letters: B rows, C columns of the prompt (cached ones included), G new tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.cache import RowKeys, SlotCache
from selfspec.draft import Needs
from selfspec.inference.prompt import Prompt
from selfspec.target import Target


class KeptRows:
    """Keys and values of rows, by the number of their prompt."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._rows: dict[int, tuple[RowKeys, int]] = {}

    def take(self, cache: SlotCache, row: int, number: int) -> None:
        """Copy a row of the running batch that has ended."""
        self._rows[number] = cache.row(row), cache.lengths[row]

    def whole(self, target: Target, generated: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """All rows, `[B, H, C + G - 1, d]` per layer.

        Transformers feeds a row that has ended with padding until the last one ends, so that is read here too.

        Args:
            target: the model.
            generated: `[B, G]` int64, the new tokens and the padding behind them.
        """
        rows = [self._rows[number] for number in range(len(self._rows))]
        lengths = [length for _, length in rows]
        behind = torch.arange(self.prompt.width, self.prompt.width + generated.shape[1] - 1, device=generated.device)
        columns = [torch.cat([row.to(behind.device), behind]) for row in self.prompt.columns()]
        cache = target.new_cache(len(rows), max(row.numel() for row in columns))
        cache.load([row for row, _ in rows], lengths)
        self._read_padding(target, cache, generated, [row.numel() for row in columns])
        return cache.spread(columns, self.prompt.width + generated.shape[1] - 1)

    def _read_padding(self, target: Target, cache: SlotCache, generated: Tensor, wanted: Sequence[int]) -> None:
        missing = [whole - length for whole, length in zip(wanted, cache.lengths, strict=True)]
        longest = max(missing)
        if longest == 0:
            return
        tail = generated[:, :-1]
        rows = [
            torch.nn.functional.pad(tail[row, tail.shape[1] - n :], (0, longest - n)) for row, n in enumerate(missing)
        ]
        target.prefill(torch.stack(rows), missing, cache, Needs())
