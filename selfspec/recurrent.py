"""Layers that carry a state from token to token (state-space models, linear attention, short convolutions).

A state cannot forget its last tokens. It is copied before a pass over guesses; when some guesses are refused the copy
is put back, and the accepted tokens go through the model again at the front of the next pass, where they cost no
pass of their own. When many have gathered, one round without guesses brings the state up to date.

Letters: B rows, H key-value heads, N tree nodes, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from selfspec.hf import LinearAttentionLayer

_PENDING_LIMIT = 8
_Copy = list[tuple[dict[int, Tensor | None], dict[int, Tensor | None]]]


class StateRecord:
    """The states of one row's layers, as of its settled tokens, and the accepted tokens they have not seen yet.

    Args:
        layers: all layers of the cache that carry state.
    """

    def __init__(self, layers: Sequence[LinearAttentionLayer]) -> None:
        self.layers = list(layers)
        self.pending: list[int] = []
        self._copy: _Copy | None = None
        self._fed: list[int] = []

    @property
    def overdue(self) -> bool:
        """Whether the next round should carry no guesses, so that the state catches up."""
        return len(self.pending) >= _PENDING_LIMIT

    def start(self, guesses: Sequence[int]) -> None:
        """Before a pass over the pending tokens and a chain of guesses, the root (which is certain) first."""
        self._fed = [*self.pending, *guesses]
        self._copy = None
        if len(guesses) > 1:
            self._copy = [(_copied(layer.conv_states), _copied(layer.recurrent_states)) for layer in self.layers]

    def keep(self, accepted: int) -> int:
        """After the pass: settle it if all `accepted` places were right, else go back; returns the tokens settled."""
        known = len(self.pending) + accepted
        if known == len(self._fed):
            self.pending = []
        else:
            assert self._copy is not None
            for layer, (conv, recurrent) in zip(self.layers, self._copy, strict=True):
                layer.conv_states, layer.recurrent_states = conv, recurrent
            self.pending = self._fed[:known]
        self._copy = None
        return 0 if self.pending else known


def _copied(states: dict[int, Any]) -> dict[int, Tensor | None]:
    return {number: None if state is None else state.clone() for number, state in states.items()}
