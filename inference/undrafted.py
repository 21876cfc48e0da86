"""No draft: rounds of one pass over one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.tree import DraftTree


class Undrafted:
    """A draft without guesses: plain decoding in the same rounds."""

    kind = "none"
    needs = Needs()

    def begin(self, verified: Verified) -> Roots:
        """Remember the newest tokens."""
        return Roots(verified.root)

    def observe(self, state: Roots, verified: Verified) -> Roots:
        """Remember the newest tokens."""
        return Roots(verified.root)

    def propose(self, state: Roots, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(state.root)


@dataclass(frozen=True, eq=False)
class Roots(DraftState):
    """The newest token of each row `[B]`."""

    root: Tensor

    def select(self, rows: Tensor) -> Roots:
        """The state of some rows."""
        return Roots(self.root[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: Roots) -> Roots:
        """See `DraftState.join`."""
        return Roots(torch.cat([self.root, other.root]))
