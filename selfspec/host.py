"""Small tensors to and from the host, without waiting for an accelerator more often than once per round.

Letters: B rows, N tree nodes, R is 1 (all rows share a shape) or B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Whether reading a value makes the host wait for work under way, so that a round should read once only."""
    return device.type != "cpu"


def on_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """Nested lists of integers as an int64 tensor; the host does not wait for the copy (`torch.tensor` would)."""
    made = torch.tensor(values, dtype=torch.long)
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[list[list[int]]]:
    """`[R, N]` tensors of integers or flags (any R and N each) as lists of rows, in one transfer."""
    first = tensors[0].device
    flat = torch.cat([t.reshape(-1).to(first, torch.long) for t in tensors]).tolist()
    found, start = [], 0
    for tensor in tensors:
        rows, width = tensor.shape
        found.append([flat[start + row * width : start + (row + 1) * width] for row in range(rows)])
        start += rows * width
    return found


@dataclass(frozen=True)
class HostShape:
    """A tree's links on the host.

    Args:
        parents: R rows of N.
        real: likewise; None when all nodes are real.
    """

    parents: list[list[int]]
    real: list[list[int]] | None

    def links(self, row: int) -> list[int]:
        """The parents of a row's nodes."""
        return self.parents[row if len(self.parents) > 1 else 0]

    def flags(self, row: int) -> list[int] | None:
        """Which of a row's nodes are real; None means all."""
        return None if self.real is None else self.real[row if len(self.real) > 1 else 0]

    @cached_property
    def ordered(self) -> bool:
        """Whether parents come before their children and the root alone has none."""
        return all(
            row[0] == -1 and all(0 <= parent < node for node, parent in enumerate(row[1:], start=1))
            for row in self.parents
        )

    @cached_property
    def _depths(self) -> list[list[int]]:
        rows = []
        for links in self.parents:
            depth = [0]
            for parent in links[1:]:
                depth.append(depth[parent] + 1)
            rows.append(depth)
        return rows

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it, and real."""
        line = list(range(-1, len(self.parents[0]) - 1))
        return self.real is None and all(row == line for row in self.parents)

    @cached_property
    def max_depth(self) -> int:
        """The depth of the deepest real node of all rows."""
        return max(self.deepest(row) for row in range(max(len(self.parents), len(self.real or [0]))))

    def deepest(self, row: int) -> int:
        """The depth of a row's deepest real node."""
        depth, flags = self._depths[row if len(self.parents) > 1 else 0], self.flags(row)
        return max(depth) if flags is None else max(d for d, real in zip(depth, flags, strict=True) if real)

    def guesses(self, row: int) -> int:
        """How many real nodes a row has, without the root."""
        flags = self.flags(row)
        return len(self.links(row)) - 1 if flags is None else sum(flags) - 1
